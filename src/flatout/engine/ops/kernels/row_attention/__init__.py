"""Attention inside concatenated rows of tens to hundreds of tokens, and with windows of
that width in rows of any length.

Flash-attention kernels work in tiles of 128 tokens; the median text has half of that,
and most of such a tile is wasted. Here tiles are 64 wide, and fully masked tiles are
skipped; a program processes one tile of a row and head in the forward pass, in the
backward pass a whole row, or a section of one with windows, and query heads that share
a key. Online softmax and recomputation follow FlashAttention-2 (Dao 2023). Dropout is
a hash of (seed, head, index), recomputed in the backward pass instead of being stored:
Philox, with ten rounds per number, cost three times the attention itself on an H200.
Scores and sums are fp32.

Legend: P tokens, R rows, H query heads, G key heads, D head dimension.
"""
