/* SISA's and Identity's local step in one pass over memory: the arithmetic of algorithms/pisa.py and
   algorithms/sisa.py in float32. native.py compiles and calls it. */

#include <math.h>
#include <stdint.h>

typedef struct {
  float *param, *dual, *moment, *pending; /* moment is 0 for Identity */
  const float *grad;
  int64_t size;
  float correction; /* 1 / sqrt(1 - beta^step) for Scheme III, else 1 */
  int32_t fresh;    /* nothing is in pending yet */
} Row;

typedef struct {
  float ratio;           /* rho / sigma */
  float scale;           /* lr / (S + lr lambda), or alpha for the pending sum */
  float grad_factor;     /* -1 to maximise; 1 / what a GradScaler multiplied by */
  float weight_decay;    /* mu - lambda */
  float clip;            /* factor on r */
  float keep, add;       /* of the second moment: keep n + add r^2 */
  float eta, eps;
  float dual_decay;
  float consensus_decay; /* lambda */
  int32_t moves;         /* take the consensus; else add to pending */
} Numbers;

enum { MOVE, START, ADD }; /* what becomes of the contribution u */

/* Inlined with constant `target`, `averages` and `decays`, so that the loop has no branches; with
   pointers and numbers of its own, so that the compiler knows that no store changes them. */
static inline __attribute__((always_inline)) void
piece(float *restrict w, float *restrict pi, float *restrict n, float *restrict pending,
      const float *restrict g, int64_t size, const float correction, const Numbers a, int target,
      int averages, int decays) {
  const float identity = 1.0f / (1.0f + a.ratio);
  for (int64_t i = 0; i < size; i++) {
    float gradient = a.grad_factor * g[i];
    if (decays) gradient += a.weight_decay * w[i];
    float r = a.clip * (pi[i] + gradient);
    float delta;
    if (averages) {
      float moment = a.keep * n[i] + a.add * (r * r);
      float root = sqrtf(moment) * correction;
      root = root < a.eta ? root : a.eta;
      delta = -r / (1.0f + a.ratio * (root + a.eps));
      n[i] = moment;
    } else {
      delta = -r * identity;
    }
    float dual = pi[i] + delta;
    float u = dual + delta;
    pi[i] = a.dual_decay * dual;
    if (target == MOVE)
      w[i] += a.scale * (u - a.consensus_decay * w[i]);
    else if (target == START)
      pending[i] = a.scale * u;
    else
      pending[i] += a.scale * u;
  }
}

#define KIND(name, target, averages, decays)                                                    \
  static void name(const Row *row, int64_t from, int64_t size, Numbers a) {                     \
    piece(row->param + from, row->dual + from, averages ? row->moment + from : 0,               \
          target == MOVE ? 0 : row->pending + from, row->grad + from, size, row->correction, a, \
          target, averages, decays);                                                            \
  }
KIND(move, MOVE, 1, 0)
KIND(move_decay, MOVE, 1, 1)
KIND(move_identity, MOVE, 0, 0)
KIND(move_identity_decay, MOVE, 0, 1)
KIND(start, START, 1, 0)
KIND(start_decay, START, 1, 1)
KIND(start_identity, START, 0, 0)
KIND(start_identity_decay, START, 0, 1)
KIND(add, ADD, 1, 0)
KIND(add_decay, ADD, 1, 1)
KIND(add_identity, ADD, 0, 0)
KIND(add_identity_decay, ADD, 0, 1)

static void (*const KINDS[3][2][2])(const Row *, int64_t, int64_t, Numbers) = {
    {{move_identity, move_identity_decay}, {move, move_decay}},
    {{start_identity, start_identity_decay}, {start, start_decay}},
    {{add_identity, add_identity_decay}, {add, add_decay}},
};

/* The share of one of `threads` threads: a piece of the rows laid end to end. */
static void share(const Row *rows, int64_t count, const Numbers *a, int64_t thread,
                  int64_t threads) {
  int64_t total = 0, before = 0;
  for (int64_t k = 0; k < count; k++) total += rows[k].size;
  /* In steps of a cache line, so that no two threads write to one. */
  const int64_t lines = (total + 15) / 16;
  const int64_t first = lines * thread / threads * 16;
  const int64_t last = lines * (thread + 1) / threads * 16;
  const int decays = a->weight_decay != 0.0f;
  for (int64_t k = 0; k < count; k++) {
    const Row *row = rows + k;
    int64_t from = first - before, to = last - before;
    if (from < 0) from = 0;
    if (to > row->size) to = row->size;
    if (from < to) {
      const int target = a->moves ? MOVE : row->fresh ? START : ADD;
      KINDS[target][row->moment != 0][decays](row, from, to - from, *a);
    }
    before += row->size;
  }
}

void torchpisa_local_step(const Row *rows, int64_t count, const Numbers *a, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t thread = 0; thread < threads; thread++) share(rows, count, a, thread, threads);
}
