"""Training steps in exact numbers: the same bits on every CPU, with any number of threads.

What follows fixes the bits; how much is computed at a time, and what is added first, does not. Numbers are fp32 where
nothing else is said. Each + - * / and square root of single numbers is one operation, rounded once as IEEE 754 says;
none are fused. Whatever adds more than two numbers adds whole multiples of one step, in sums below 2^53 steps, which
float64 holds: they have no order. The grid of a row is told by its step, a power of two.

    bits(k)       min(22, (53 - ceil(log2 k)) // 2), for sums of k products
    step(row, k)  2^-bits(k) times the least power of two above the largest magnitude in it; at least 2^-126
    grid(row)     each number rounded to whole steps, ties to even
    a b           rows of a and columns of b on grid, for k as long as they are; the sum rounded to fp32
    total(row)    numbers on a grid of min(30, 53 - ceil(log2 of how many)) bits; their sum, in float64
    2^x           n = round(x), f = x - n;  p(f) 2^n by `grids._POWERS`, from the highest power down; 0 from -126 down
    e^x           2^(x log2 e)
    log, cos, sin series of float64 (`grids`), rounded
    y = x W^T     dx = dy W and dW = dy^T x, of dy on the grids of its rows for the longer of both sums; in the
                  second x is multiplied by the step of dy's row, relative to the largest, before it is on its grid
    norm          i = 1 / sqrt(total(x x) / width + eps) in float64, rounded;  n = x i,  y = n w
                  dw = total(dy n),  dx = (dy w - n (total(dy n w) / width)) i
    silu(g) u     s = 1 / (1 + e^-g), the power at most 2^126;  g s u;  du = dy (g s),  dg = dy ((s (g (1 - s) + 1)) u)
    attention     e = grid(e^(q k - max)) for k = rows: the queries of one key head;  o = (e v) / sum(e) in float64
                  dv = e^T (do / sum(e)),  ds = (do v^T - total(do o)) (e / sum(e)),  dq = ds k,  dk = ds^T q as dW,
                  all but the products with channels on grids for k = rows; q is divided by sqrt(channels) before
    cross entropy log(total(e)) - (l - max) in float64, e = e^(l - max), rounded; total over tokens, by their number
                  dl = (e / total(e) - 1 at the target) by their number
    embedding     dE = total over a token's places, on one grid for each channel of a micro-batch
    rotation      cosines and sines of fp32(position * wavelength), of wavelengths by decimal numbers
    clipping      by the norm of `sync.merge.outer`;  AdamW and SGD are those of it

So 22 bits are kept of sums of up to 512 products, 20 of 8,192, 18 of 131,072. Tensors are added as the decoder adds
them, micro-batches one after the other.

    grids         these numbers          functions   the parts of a decoder, with gradients
    decoder       its loss               arithmetic  exact or as fast as may be, as a run says

The same step is written down once more, operation by operation and by numpy, in `weft.verify.evidence.program`: for who
is shown one number of it. What changes here changes there.

What it does not know: GPUs, adapters, pairs of answers, Muon. Held-out losses are computed as fast as may be.
"""
