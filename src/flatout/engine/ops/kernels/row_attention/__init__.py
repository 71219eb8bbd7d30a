"""Attention inside rows laid end to end, for rows of tens to hundreds of tokens, and
for windows as narrow in rows of any length.

Flash-attention kernels work in tiles of 128 tokens; the median text has half of that,
and most of such a tile is thrown away. Here tiles are 64 wide, and those that no query
of a tile may look at are left out; a program takes one tile of a row and head forward,
backward a whole row, or a section of one with windows, and query heads that share a
key. Online softmax and recomputation as in FlashAttention-2 (Dao 2023); dropout by
hashing (seed, head, place), again in the backward pass instead of being stored: Philox,
ten rounds a number, cost three times the attention itself on an H200. Scores and sums
are fp32.

Legend: P tokens, R rows, H query heads, G key heads, D head dimension.
"""
