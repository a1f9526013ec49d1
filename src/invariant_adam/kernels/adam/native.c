/* Invariant Adam's pass over memory on a CPU; `native.py` builds and calls it.

   The file includes itself once for float and once for double. A pass reads and writes each element once:

       m = keep1 m + gain1 g        v = keep2 v + gain2 g^2        w = decay w - size m / (sqrt(v) + eps)

   Without g nothing is folded; without w nothing moves; `squares` takes the place of g^2. An element of g that is not
   below `limit` in magnitude counts as zero, and is counted; so is one whose square is not below limit^2. */

#ifndef REAL

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define STRETCH (1 << 20)

#define REAL float
#define SQRT sqrtf
#define ABS fabsf
#define NAME(x) x##_float
#include "native.c"
#undef REAL
#undef SQRT
#undef ABS
#undef NAME
#define REAL double
#define SQRT sqrt
#define ABS fabs
#define NAME(x) x##_double
#include "native.c"

#else

struct NAME(scalars) {
    REAL keep1, keep2, gain1, gain2, size, eps, decay, limit;
};

/* One stretch of one tensor, at most STRETCH elements. The three flags are constants wherever this is called, so that no loop holds a branch. */
static inline __attribute__((always_inline)) int NAME(stretch)(
    REAL *restrict w, const REAL *restrict g, const REAL *restrict squares, REAL *restrict m, REAL *restrict v, int64_t n,
    const struct NAME(scalars) s, const int folds, const int paired, const int moves)
{
    const REAL limit2 = s.limit * s.limit;
    int left_out = 0; /* as wide as a float, for the vectors' sake */
    for (int64_t i = 0; i < n; i++) {
        REAL m1 = m[i], v1 = v[i];
        if (folds) {
            const REAL x = g[i], y = paired ? squares[i] : x * x;
            int fine = ABS(x) < s.limit; /* NaN is not below anything */
            if (paired)
                fine &= y < limit2;
            m[i] = m1 = s.keep1 * m1 + s.gain1 * (fine ? x : 0);
            v[i] = v1 = s.keep2 * v1 + s.gain2 * (fine ? y : 0);
            left_out += !fine;
        }
        if (moves)
            w[i] = s.decay * w[i] - s.size * m1 / (SQRT(v1) + s.eps);
    }
    return left_out;
}

/* A pass over `count` tensors by `threads` threads, each on its share of all elements. Returns how many of them were
   left out of a fold. `w`, `g` and `squares` may be NULL. */
int64_t NAME(pass)(
    int64_t count, const int64_t *sizes, REAL *const *w, const REAL *const *g, const REAL *const *squares,
    REAL *const *m, REAL *const *v, const double *scalars, int threads)
{
    const struct NAME(scalars) s = {
        (REAL)scalars[0], (REAL)scalars[1], (REAL)scalars[2], (REAL)scalars[3],
        (REAL)scalars[4], (REAL)scalars[5], (REAL)scalars[6], (REAL)scalars[7],
    };
    int64_t total = 0, left_out = 0;
    for (int64_t i = 0; i < count; i++)
        total += sizes[i];
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) reduction(+ : left_out) if (threads > 1)
#endif
    {
#ifdef _OPENMP
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
#else
        const int64_t me = 0, all = 1;
#endif
        /* Borders between threads lie on whole cache lines, where tensors begin on one. */
        const int64_t begin = total * me / all & ~15, end = me == all - 1 ? total : total * (me + 1) / all & ~15;
        int64_t before = 0;
        for (int64_t i = 0; i < count && before < end; before += sizes[i++]) {
            const int64_t to = end - before < sizes[i] ? end - before : sizes[i];
            for (int64_t at = begin > before ? begin - before : 0; at < to; at += STRETCH) {
                const int64_t n = to - at < STRETCH ? to - at : STRETCH;
                REAL *wi = w ? w[i] + at : NULL, *mi = m[i] + at, *vi = v[i] + at;
                const REAL *gi = g ? g[i] + at : NULL, *yi = squares ? squares[i] + at : NULL;
                if (!g)
                    NAME(stretch)(wi, NULL, NULL, mi, vi, n, s, 0, 0, 1);
                else if (!w && !squares)
                    left_out += NAME(stretch)(NULL, gi, NULL, mi, vi, n, s, 1, 0, 0);
                else if (!w)
                    left_out += NAME(stretch)(NULL, gi, yi, mi, vi, n, s, 1, 1, 0);
                else if (!squares)
                    left_out += NAME(stretch)(wi, gi, NULL, mi, vi, n, s, 1, 0, 1);
                else
                    left_out += NAME(stretch)(wi, gi, yi, mi, vi, n, s, 1, 1, 1);
            }
        }
    }
    return left_out;
}

#endif
