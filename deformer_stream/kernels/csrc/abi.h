/* The structures and constants that Python and the compiled code share.
 *
 * `kernels/abi.py` declares the same structures. After loading the library it compares ABI_VERSION, every size and
 * every constant (abi.c), and refuses a library that differs. Every field is eight bytes long: a pointer, an int64_t or
 * a double. Raise ABI_VERSION if the meaning of a field changes while the sizes stay.
 *
 * Letters in shapes: d is the width of a token, F the number of features, R the number of records of a batch, M the
 * number of its new readings and Z the number of those that are scored. */
#ifndef ABI_H
#define ABI_H
#include "gemm.h"

#define ABI_VERSION 1

#define KV_PAGE_TOKENS 16            /* tokens of a page of the KV cache: one vector of scores */
#define MAX_HEADS 64                 /* attention heads of a layer */
#define PRIOR_LANES 8                /* components of the Gaussian prior side by side: a vector of doubles */
#define MAX_CONDITIONING_VALUE 20.0f /* normalised values are clipped to +- this before they enter the network */
#define LINEAR_LIMIT 8.0f            /* beyond this, a normalised value grows with the logarithm of its distance */
#define MAX_LOG_SCALE_CHANGE 5.0f    /* the network widens components of the prior by at most e^5 */
enum { ACTIVATION_GELU = 0, ACTIVATION_RELU = 1 };

/* Vectors that a reading leaves in the KV cache for the Gaussian prior after its row of the Cholesky factor:
 * 1 / pivot, whitened residual, feature, and the log-likelihood so far, whose doubles take two vectors. */
enum { ROW_INVERSE_PIVOT, ROW_RESIDUAL, ROW_FEATURE, ROW_LIKELIHOOD, ROW_EXTRA_VECTORS = ROW_LIKELIHOOD + 2 };

/* The weights of a Transformer layer. */
typedef struct {
    const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;   /* (d) each */
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;               /* (outputs) each */
    const factor_t *qkv, *out, *up, *down;                                /* packed: see gemm.h */
} Layer;

/* A linear map in float32. Columns are padded to a multiple of 32 with zero weights. */
typedef struct {
    int64_t inputs, columns;
    const float *weights; /* (columns / 32, inputs, 32) */
    const float *bias;    /* (columns) */
} LinearMap;

/* What turns readings into tokens.
 *
 * The first hidden layer of an observation token u is linear in a reading's feature and value. It is computed as a
 * sum of a share of the feature and a share of the value. */
typedef struct {
    int64_t width, num_maps;   /* of the first hidden layer; of the maps that follow it */
    const float *identity;     /* (F, d) query tokens z without the prior's part */
    const float *feature_share; /* (F, width) */
    const float *value_share;  /* (3, width) of the value; of the sine and of the cosine of a position on a cycle */
    const float *cycle;        /* (F, 2) angle of the value 0, and angle per unit; 0 if the feature is not a cycle */
    const float *label_share;  /* (rows, width) of labels */
    const int64_t *first_label_row, *num_labels; /* (F) a feature's first row there, and its labels; then "unseen" */
    const LinearMap *maps;     /* (num_maps) */
    const LinearMap *prior_map; /* what the prior conditional adds to z; NULL without a prior */
} TokenEncoder;

/* The Gaussian prior: a mixture of full-covariance Gaussians over D continuous features. */
typedef struct {
    int64_t num_components, padded_components; /* padded to a multiple of 8 with components of weight 0 */
    int64_t num_features;                      /* D */
    const double *log_weights;                 /* (padded) */
    const double *means;                       /* (D, padded) */
    const double *covariances;                 /* (D, D, padded) */
    const int64_t *row_page, *row_place;       /* (readings of a record) column of the page table, and vector in the
                                                * page, where the k-th reading's row of the Cholesky factor is */
    const int64_t *column_by_code;             /* (F) which of the D features a feature is, or -1 */
} Prior;

/* What turns the network's outputs into conditionals. */
typedef struct {
    int64_t num_components, num_prior_components; /* of the mixture: the network's own, and those of the prior */
    int64_t num_labels;                           /* label logits of the network */
    const float *norm_weight, *norm_bias;         /* (d) of the final layer normalisation, or NULL */
    const float *scale_floor;                     /* (F) smallest scale of a component */
    const float *unseen_log_mass;                 /* (F, 2) ln of the mass of seen labels, and of unseen ones */
    const int64_t *label_counts;                  /* (F) labels of a feature, 0 if it is continuous */
    const LinearMap *mixture_map;                 /* -> log weights, scales, means (3 x components), label logits */
    const LinearMap *adjust_map;                  /* -> changes of the prior's components (3 x); NULL without a prior */
} Head;

/* A model. */
typedef struct {
    int64_t d, num_heads, feedforward, num_layers;
    int64_t tokens_per_reading; /* tokens of a reading in the KV cache: u (1), or z and u (2) */
    int64_t is_pre_norm;        /* normalisation before attention and feed-forward, or after */
    int64_t activation;         /* ACTIVATION_... */
    const Layer *layers;
    const TokenEncoder *encoder;
    const Prior *prior; /* or NULL */
    const Head *head;
} Network;

/* New readings of R records, one record after the other. The last readings of each record are scored ("queries"); the
 * ones before them only enter the KV cache again. */
typedef struct {
    const Network *network;
    const int64_t *features;      /* (M) feature codes */
    const float *values;          /* (M) normalised values, or label codes */
    const int64_t *offsets;       /* (R + 1) where each record's readings begin */
    const int64_t *query_offsets; /* (R + 1) where each record's scored readings begin among all scored ones */
    const int64_t *num_cached;    /* (R) readings of each record in the KV cache */
    const int64_t *depths;        /* (M) how many readings of its record each reading sees; NULL: all before it. The
                                   * reading is written behind those, over what was there. */
    const int64_t *page_table;    /* (R, page_table_columns) page numbers */
    char *page_pool;
    float *prior_log_weights, *prior_means, *prior_scales; /* (Z, padded_components) outputs; NULL without a prior */
    float *hidden;                /* (Z, d) output: the network's outputs at z; if NULL, score_terms is written */
    float *score_terms;           /* (3, Z) output: ln p, ln of the p-value, centered NLL */
    int64_t *next_unit;           /* shared counter: the next unit of work */
    int64_t num_records, page_table_columns, page_bytes;
    int64_t tokens_per_unit;      /* tokens that go through the layers together */
} Batch;

/* Surprisals of M values under M mixtures. */
typedef struct {
    const float *log_weights, *means, *scales; /* (M, components) */
    const float *values;                       /* (M) */
    float *surprisal;                          /* (M) output: -ln p(value) */
    float *minimum, *mean, *variance;          /* (M) outputs: of -ln p(V), for V drawn from the mixture */
    int64_t num_readings, num_components;
    int64_t *next_reading;                     /* shared counter */
} SurprisalTask;

/* Quantiles of M mixtures. */
typedef struct {
    const float *log_weights, *means, *scales; /* (M, components) */
    const float *levels;                       /* (levels) */
    float *quantiles;                          /* (levels, M) output */
    int64_t num_readings, num_components, num_levels;
    int64_t *next_reading;                     /* shared counter */
} QuantileTask;

/* The running statistics of a record: `RUNNING_DTYPE` of engine/records.py. */
typedef struct {
    int64_t num_scored;
    double neg_log_p_sum, min_log_p; /* of p-values raised to p_value_exponent */
    double max_statistic, log_likelihood, centered_nll, p_value;
} RunningState;

/* New score terms of R records, by which their running statistics advance. */
typedef struct {
    const int64_t *record_index;         /* (R) the records' entries in `running` */
    const int64_t *offsets;              /* (R + 1) where each record's readings begin */
    const double *score_terms;           /* (3, M) ln p, ln of the p-value, centered NLL */
    const char *is_scored, *is_decided;  /* (M) or NULL if all are; is_decided: whether a prefix may end here */
    RunningState *running;
    double *out;                         /* (3, M) output: ln p (NaN if not scored), its sum, the running statistic */
    int64_t num_records;
    double p_value_exponent;             /* power of the p-values before they are combined */
} AdvanceTask;

/* A function that several threads execute together: each call of `run_one_thread` is one thread's part. */
typedef struct {
    int64_t (*function)(const void *task); /* returns a negative number if memory is short */
    const void *task;
    int64_t calls_left;                    /* threads that may still start: there is no work for more */
    int64_t failed;                        /* output: whether a call returned a negative number */
} ThreadTeam;
#endif
