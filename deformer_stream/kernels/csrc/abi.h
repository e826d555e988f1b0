/* The structures and constants that Python shares with the compiled kernels.
 *
 * `kernels/abi.py` declares the same structures in Python. When a library is loaded, it compares ABI_VERSION, the size
 * of every structure and every constant (through the functions of abi.c). A library that differs is refused. Every
 * field is eight bytes long: a pointer, an int64_t or a double. Raise ABI_VERSION if the meaning of a field changes,
 * but no size.
 *
 * Letters in shapes: d is the width of a token, F the number of features of the schema, R the number of records of a
 * batch, M the number of their new readings, and Z the number of new readings that are scored. T is the number of
 * inputs that express the time of an irregular reading.
 *
 * A reading is one value of one feature, of a record. The Transformer has a query token z (which feature is next) for
 * each scored reading, and an observation token u (feature and value) for each reading. Its outputs at z give the
 * conditional, the distribution of the reading's value given the earlier readings. */
#ifndef ABI_H
#define ABI_H
#include "gemm.h"

#define ABI_VERSION 2

#define KV_PAGE_TOKENS 16            /* tokens of a page of the KV cache: one or more vectors of attention scores */
#define MAX_HEADS 64                 /* largest number of attention heads of a layer */
#define PRIOR_LANES 8                /* components of the Gaussian prior are padded to a multiple of it */
#define MAX_NEIGHBORS 32             /* largest number of readings on which the Gaussian process conditions a reading */
#define MAX_PROCESS_SCALES 16        /* largest number of time scales of the Gaussian process */
#define MAX_NEIGHBOR_VALUE 6.0       /* differences of neighbors' values from their means are clipped to +- this */
#define MAX_AGE 4.0                  /* ages are clipped to +- this many durations before they enter the network */
#define READING_BYTES 16             /* an irregular reading in the KV cache: age, value and feature code */
#define MAX_CONDITIONING_VALUE 20.0f /* normalised values are clipped to +- this before they enter the network */
#define LINEAR_LIMIT 8.0f            /* normalised values beyond +- this grow as the logarithm of the raw distance */
#define MAX_LOG_SCALE_CHANGE 5.0f    /* the network changes scales of the prior by at most a factor e^5 */
enum { ACTIVATION_GELU = 0, ACTIVATION_RELU = 1 };

/* The vectors that the KV cache stores for a reading after its row of the Cholesky factor, one double per component of
 * the Gaussian prior (gaussian_prior.h explains the terms): 1 / pivot, whitened residual, index of the feature in the
 * prior (or -1), and the log-likelihood of all readings so far. */
enum { ROW_INVERSE_PIVOT, ROW_RESIDUAL, ROW_FEATURE, ROW_LIKELIHOOD, ROW_EXTRA_VECTORS = ROW_LIKELIHOOD + 1 };

/* The weights of one Transformer layer. */
typedef struct {
    const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;   /* (d) each */
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;               /* (outputs of the linear map) each */
    const factor_t *qkv, *out, *up, *down;                                /* packed as gemm.h describes */
} Layer;

/* A linear map in float32. Its outputs are padded to a multiple of 32 columns with zero weights. */
typedef struct {
    int64_t inputs, columns;
    const float *weights; /* (columns / 32, inputs, 32) */
    const float *bias;    /* (columns) */
} LinearMap;

/* The weights that compute the input tokens of the Transformer from readings.
 *
 * An observation token u is the output of several linear maps with ReLU between them. The first map is applied to a
 * concatenation of feature and value, so its output is the sum of one term ("share") for each of them. The shares of
 * all features and labels are computed beforehand. */
typedef struct {
    int64_t width, num_maps;   /* width: outputs of the first map. num_maps: maps after it */
    const float *identity;     /* (F, d) query token of each feature, without the terms of prior and time */
    const float *feature_share; /* (F, width) */
    const float *value_share;  /* (3, width) factors of the value; of sine and cosine if values lie on a cycle */
    const float *cycle;        /* (F, 2) angle of the value 0, and angle per unit; 0 without a cycle */
    const float *label_share;  /* (rows, width) of the labels of all discrete features */
    const int64_t *first_label_row, *num_labels; /* (F) row of the feature's first label in label_share; its number of
                                                  * labels, whose rows are followed by one for all other labels */
    const LinearMap *maps;     /* (num_maps) */
    const LinearMap *query_map; /* term in z of the prior's conditional and of the time inputs; NULL without both */
    const LinearMap *time_map;  /* term in u of the time inputs; NULL if readings are not irregular */
} TokenEncoder;

/* The constants from which the T time inputs of irregular readings are computed. */
typedef struct {
    int64_t num_inputs, num_octaves; /* T; number of sines, and of cosines, of the age */
    double durations_per_second;     /* 1 / usual duration of a record */
    double resolutions_per_second;   /* 1 / usual smallest time between two readings of a record */
    double largest_log_gap;          /* ln(1 + duration / resolution), which divides the logarithms of gaps */
} TimeScales;

/* The Gaussian prior: a mixture of full-covariance Gaussians over D continuous features, fitted before training. Its
 * exact conditionals are inputs of the network. */
typedef struct {
    int64_t num_components, padded_components; /* padded to a multiple of 8 with components of weight 0 */
    int64_t num_features;                      /* D */
    const double *log_weights;                 /* (padded) */
    const double *means;                       /* (D, padded) */
    const double *covariances;                 /* (D, D, padded) */
    const int64_t *row_page, *row_place;       /* (largest number of readings) where the row of the Cholesky factor of
                                                * a record's reading k is: column of the page table that lists its page;
                                                * index of its first vector in the page */
    const int64_t *column_by_code;             /* (F) index of the feature among the D features of the prior, or -1 */
} Prior;

/* The Gaussian process prior of irregular readings, fitted before training. Its conditionals, mixtures of two Gaussians
 * with the same mean, are inputs of the network. Q is the number of its time scales. */
typedef struct {
    int64_t num_features, num_scales, num_neighbors; /* F, Q, and largest number of neighbors of a reading */
    double decay;                    /* factor of the correlation of a reading for each later reading of its sensor */
    const double *covariances;       /* (F, Q, F) of two features, for each time scale */
    const double *negative_rates;    /* (Q) -1 / time scale */
    const double *means;             /* (F) */
    const double *variances;         /* (F) of a reading, with its noise */
    const double *noise_variances;   /* (F) */
    const double *inverse_deviations; /* (F) 1 / root of the variance; 0 if the process lacks the feature */
    const double *outlier_factors;   /* (F) scale of the second Gaussian relative to the first one */
    const float *log_weights;        /* (F, 2) of the two Gaussians */
} Process;

/* The weights that compute conditionals (distributions of the next value) from the network's outputs at z. */
typedef struct {
    int64_t num_components, num_prior_components; /* of the mixture: computed by the network; of the prior */
    int64_t num_labels;                           /* label logits that the network computes */
    const float *norm_weight, *norm_bias;         /* (d) of the final layer normalisation, or NULL */
    const float *scale_floor;                     /* (F) smallest scale of a mixture component */
    const float *unseen_log_mass;                 /* (F, 2) ln of the probability of seen labels; of unseen ones */
    const int64_t *label_counts;                  /* (F) labels of a feature, 0 if it is continuous */
    const LinearMap *mixture_map;                 /* outputs: log weights, scales, means, label logits */
    const LinearMap *adjust_map;                  /* outputs: changes of the prior's components; or NULL */
} Head;

/* A complete model. */
typedef struct {
    int64_t d, num_heads, feedforward, num_layers;
    int64_t tokens_per_reading; /* cached tokens of a reading: 1 (only u) or 2 (z, then u) */
    int64_t is_pre_norm;        /* 1: normalisation before attention and feed-forward part; 0: after them */
    int64_t activation;         /* one of the constants ACTIVATION_... */
    const Layer *layers;
    const TokenEncoder *encoder;
    const Prior *prior; /* or NULL */
    const Process *process;  /* or NULL */
    const TimeScales *times; /* NULL if readings are not irregular */
    const Head *head;
} Network;

/* The arguments of `score_batch`: new readings of R records, one record after the other, and the outputs.
 *
 * The last new readings of each record are scored; they are its "queries". The ones before them were scored earlier and
 * are only written to the KV cache again. */
typedef struct {
    const Network *network;
    const int64_t *features;      /* (M) feature codes */
    const float *values;          /* (M) normalised values, or label codes */
    const int64_t *offsets;       /* (R + 1) where each record's readings begin */
    const int64_t *query_offsets; /* (R + 1) where each record's scored readings begin among all scored ones */
    const int64_t *num_cached;    /* (R) readings of each record in the KV cache */
    const int64_t *depths;        /* (M) NULL: a reading sees all readings before it. Else a reading of depth k sees the
                                   * first k cached readings of its record. It is then written to the cache as number
                                   * k, from 0, over an earlier one. */
    const int64_t *page_table;    /* (R, page_table_columns) page numbers */
    const double *ages;           /* (M) seconds from the origin of the record; NULL if readings are not irregular */
    char *page_pool;              /* the pages of the KV cache, page_bytes each */
    float *prior_log_weights, *prior_means, *prior_scales; /* (Z, padded_components) outputs, (Z, 2) of a process; NULL
                                                            * without a prior */
    float *hidden;                /* (Z, d) output: the last layer's outputs at z. If NULL, score_terms is written */
    float *score_terms;           /* (3, Z) output: ln p of the value, ln of the p-value, centered NLL (-ln p minus
                                   * its expected value) */
    float *log_p_prior;           /* (Z) output: ln of the p-value under the prior alone, 0 for readings that it lacks;
                                   * given those of other sensors only if readings are irregular; NULL: not computed */
    int64_t *next_unit;           /* counter that all threads share: the next unit of work */
    int64_t num_records, page_table_columns, page_bytes;
    int64_t tokens_per_unit;      /* tokens that go through the layers together */
} Batch;

/* The arguments of `compute_surprisals`: M values, a mixture of Gaussians for each, and the outputs. */
typedef struct {
    const float *log_weights, *means, *scales; /* (M, components) */
    const float *values;                       /* (M) */
    float *surprisal;                          /* (M) output: -ln p(value) */
    float *minimum, *mean, *variance;          /* (M) outputs: of -ln p(V), for V drawn from the mixture */
    int64_t num_readings, num_components;
    int64_t *next_reading;                     /* shared counter */
} SurprisalTask;

/* The arguments of `compute_quantiles`: M mixtures of Gaussians, probabilities ("levels"), and the output. */
typedef struct {
    const float *log_weights, *means, *scales; /* (M, components) */
    const float *levels;                       /* (levels) */
    float *quantiles;                          /* (levels, M) output */
    int64_t num_readings, num_components, num_levels;
    int64_t *next_reading;                     /* shared counter */
} QuantileTask;

/* The arguments of `condition_sequences`: sequences of irregular readings, and outputs for all readings from `first` on.
 */
typedef struct {
    const Process *process;
    const int64_t *features;                   /* (N, L) codes, -1 for padding, which may be at any position */
    const float *values;                       /* (N, L) */
    const double *ages;                        /* (N, L) seconds since the origin of the record */
    double *means, *deviations;                /* (N, L - first) output; 0 and 1 if the process lacks the feature */
    int64_t num_sequences, num_readings, first; /* N, L */
    int64_t is_own_excluded;                   /* whether readings of the same sensor are no neighbors */
    int64_t *next_sequence;                    /* shared counter */
} ProcessTask;

/* The running statistics of a record: `RUNNING_DTYPE` of engine/records.py, whose fields have the same order. */
typedef struct {
    int64_t num_scored;
    double neg_log_p_sum, min_log_p; /* sum of -ln q, and smallest ln q, of the p-values q raised to p_value_exponent */
    double max_statistic;            /* the record's anomaly score: the largest statistic after any of its readings */
    double log_likelihood, centered_nll; /* sums over the scored readings */
    double p_value;                  /* of the record; not changed here */
    double prior_neg_log_p_sum, prior_min_log_p; /* the same of the p-values under the Gaussian prior alone; 0 without */
} RunningState;

/* The arguments of `advance_statistics`: the score terms of new readings of R records, and the statistics to update. */
typedef struct {
    const int64_t *record_index;         /* (R) the records' entries in `running` */
    const int64_t *offsets;              /* (R + 1) where each record's readings begin */
    const double *score_terms;           /* (3, M) ln p, ln of the p-value, centered NLL */
    const char *is_scored;               /* (M) 0 for readings that change no statistic; NULL: all readings count */
    const char *is_decision_point;       /* (M) 0 for readings after which max_statistic is not updated; NULL: none */
    const double *distance_terms;        /* (M) terms of the statistic that come from distances; NULL: none */
    const double *log_p_prior;           /* (M) ln of the p-value under the Gaussian prior alone; NULL: no such term */
    const double *line_starts, *line_slopes; /* (2, num_lines) lines that turn combined p-values into terms of the
                                              * statistic, by number of scored readings, from 1 on: those of the network,
                                              * then those under the prior alone; NULL without log_p_prior */
    RunningState *running;               /* statistics of all records, updated for the R records */
    double *score_rows;                  /* (3, M) output: ln p (NaN if not scored), its sum, max_statistic so far */
    /* The rest is for statistics from cumulative sums (calibration/cusum.py); NULL and 0 if p-values are combined. */
    float *cusum_states;                 /* (records, 6F + 1) states of all records, updated for the R records */
    const int64_t *codes;                /* (M) sensors of the readings */
    const float *values;                 /* (M) their values, as the network reads them */
    const double *log_p_others;          /* (M) ln of the p-value given the readings of other sensors only; NULL: none */
    const double *log_resolutions;       /* (F) ln of the width of each sensor's values, -inf if it is unknown */
    const double *slopes, *intercepts;   /* (6, F) lines that turn the evidence of each sensor into statistics */
    const double *level_edges;           /* (F, num_cells + 1) edges of the cells of each sensor's values; NULL: none */
    const double *level_log_p;           /* (F, num_cells + 2) ln of the p-value below, in and above these cells */
    const double *step_slopes;           /* (F) a step is value - slope * previous value of the sensor */
    const double *step_edges;            /* (F, num_step_cells + 1) edges of the cells of each sensor's steps; NULL: none */
    const double *step_log_p;            /* (F, num_step_cells + 2) ln of the p-value below, in and above these cells */
    int8_t *largest_kinds;               /* (M) output: kind of the largest statistic, -1 if it raises no max_statistic */
    int64_t num_records, num_lines, num_sensors, num_cells, num_step_cells;
    double p_value_exponent;             /* power to which p-values are raised before they are combined */
    double max_neg_log_p_prior;          /* largest -ln p of a reading under the Gaussian prior that counts */
    double record_slope, record_intercept; /* line that turns the sum of the record into a statistic */
    double sensor_kappa, offset_kappa, step_kappa; /* kappa of the sums "improbable" and "level", "offset", and "step" */
    double record_kappa;                 /* kappa of the sum of the record */
    double max_surprise, max_repetition; /* largest -ln p that a sum counts, and largest increment of "repeated" */
    double max_extreme;                  /* largest -ln p of the evidence "extreme" */
    double tie_tolerance;                /* largest difference of statistics that count as equal */
} AdvanceTask;

/* The arguments of `measure_distances`: the readings of R records from their first ones, and E stored records. */
typedef struct {
    const int64_t *offsets;    /* (R + 1) where each record's readings begin among the M readings */
    const int64_t *num_before; /* (R) number of first readings of each record whose distances are not needed */
    const int64_t *excluded;   /* (R) index of a stored record that is left out, -1 for none */
    const double *bounds;      /* (M) distances of which it is enough to know that they are not greater; NULL: none */
    const int64_t *codes;      /* (M) features of the readings */
    const float *positions;    /* (M) their positions, divided by the typical difference of the feature */
    const float *stored;       /* (F, E) positions of the stored records, NaN if a record lacks the feature */
    const int8_t *feature_kinds; /* (F) kinds of the features */
    const float *extents;      /* (F) difference of two labels, or length of the cycle */
    float *sums;               /* (E) scratch memory */
    double *out;               /* (M) output: mean distance of the prefix that ends with each reading; if it is not above
                                * its bound, a number between the two */
    int64_t num_records, num_stored;
    int64_t num_first;         /* number of stored records that are compared first, if there are bounds */
    double missing_difference; /* difference to a stored record that lacks the feature */
} DistanceTask;

/* The argument of `run_one_thread`: a function that several threads execute at once, and its own argument. */
typedef struct {
    int64_t (*function)(const void *task); /* returns a negative number if memory is short */
    const void *task;
    int64_t calls_left;                    /* calls that still execute the function; later calls return at once */
    int64_t failed;                        /* output: 1 if a call returned a negative number, else 0 */
} ThreadTeam;
#endif
