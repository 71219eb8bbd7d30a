"""Attention within concatenated rows of tens to hundreds of tokens, or within windows
of that width in rows of any length.

Flash-attention kernels work in tiles of 128 tokens. The median text is half as long as
a tile, so much of the tile is wasted. Here, tiles are 64 wide, and fully masked tiles
are skipped. In the forward pass, a program processes one tile of a row and head. In the
backward pass, it processes query heads that share a KV head, for a whole row or, with
windows, for a section of a row. Online softmax and recomputation follow
FlashAttention-2 (Dao 2023). Dropout is a hash of (seed, head, index), which the
backward pass recomputes instead of storing it. Philox, with ten rounds per number, took
three times as long as the attention itself on an H200. Scores and sums are fp32.

In the shapes below, P is the number of tokens, R the number of rows, H the number of
query heads, G the number of KV heads, and D the head dimension.
"""
