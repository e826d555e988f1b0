/* Computation of the Transformer's input tokens from readings: query tokens z (which feature is next) and observation
 * tokens u (feature and value). */
#ifndef TOKEN_ENCODER_H
#define TOKEN_ENCODER_H
#include "linear_map.h"

#define ROWS_TOGETHER 96 /* readings to which a linear map is applied at once: few enough for the processor's cache */

/* Return the index of a record's i-th scored reading among all new readings of the batch.
 *
 * The last new readings of each record are scored, the ones before them are only written to the KV cache. */
INLINE int64_t query_place(const Batch *batch, int64_t record, int64_t i) {
    int64_t num_queries = batch->query_offsets[record + 1] - batch->query_offsets[record];
    return batch->offsets[record + 1] - num_queries + i;
}

/* Return the address of the page in a column of a record's row of the page table. */
INLINE char *page_address(const Batch *batch, int64_t record, int64_t column) {
    return batch->page_pool + batch->page_table[record * batch->page_table_columns + column] * batch->page_bytes;
}

/* Return the label code of a discrete feature's value. Labels that training has not seen have the code `num_labels`. */
INLINE int64_t label_code(float value, int64_t num_labels) {
    return value > 0 ? (value < num_labels ? (int64_t)value : num_labels) : 0;
}

/* Compute the output of the first linear map of an observation token, before ReLU: out (width).
 *
 * It is the sum of a term of the feature and a term of the label, the value, or sine and cosine of a cyclic value. */
static void encode_reading(const TokenEncoder *e, int64_t feature, float value, float *out) {
    size_t width = e->width;
    const float *feature_share = e->feature_share + feature * width;
    float number = fminf(fmaxf(value, -MAX_CONDITIONING_VALUE), MAX_CONDITIONING_VALUE);
    float angle_per_unit = e->cycle[2 * feature + 1];
    if (e->num_labels[feature]) {
        int64_t row = e->first_label_row[feature] + label_code(value, e->num_labels[feature]);
        const float *label_share = e->label_share + row * width;
        for (size_t i = 0; i < width; i += LANES) store(out + i, load(feature_share + i) + load(label_share + i));
    } else if (angle_per_unit != 0) { /* a value on a cycle: undo the logarithmic compression beyond LINEAR_LIMIT */
        float size = fabsf(number), far = copysignf(LINEAR_LIMIT + expm1f(size - LINEAR_LIMIT), number);
        float angle = e->cycle[2 * feature] + angle_per_unit * (size > LINEAR_LIMIT ? far : number);
        float sine = sinf(angle), cosine = cosf(angle);
        const float *sine_share = e->value_share + width, *cosine_share = sine_share + width;
        for (size_t i = 0; i < width; i += LANES)
            store(out + i, load(feature_share + i) + sine * load(sine_share + i) + cosine * load(cosine_share + i));
    } else
        for (size_t i = 0; i < width; i += LANES)
            store(out + i, load(feature_share + i) + number * load(e->value_share + i));
}

/* Return the largest number of outputs of a linear map, except for the last one, whose output is the token. */
static size_t widest_layer(const TokenEncoder *e) {
    size_t widest = e->width;
    for (int64_t m = 0; m + 1 < e->num_maps; m++) widest = max_size(widest, e->maps[m].columns);
    return widest;
}

/* Compute the observation tokens of `count` readings: u (count, d).
 *
 * time_inputs: (count, T) inputs that express the times of irregular readings; ignored for other models.
 * The readings go through the linear maps in groups of ROWS_TOGETHER. scratch: (2, ROWS_TOGETHER, `widest_layer`)
 * floats for the input and the output of a map, which are exchanged after each map. */
static void encode_observations(const TokenEncoder *e, size_t d, const int64_t *features, const float *values,
                                const float *time_inputs, size_t count, float *scratch, float *u) {
    float *first_token = u;
    for (size_t from = 0; from < count; from += ROWS_TOGETHER, u += ROWS_TOGETHER * d) {
        size_t num_rows = min_size(count - from, ROWS_TOGETHER), width = e->width;
        float *input = scratch, *output = scratch + ROWS_TOGETHER * widest_layer(e);
        float *first = e->num_maps ? input : u; /* output of the first map, which is the token if no map follows */
        for (size_t r = 0; r < num_rows; r++)
            encode_reading(e, features[from + r], values[from + r], first + r * width);
        for (int64_t m = 0; m < e->num_maps; m++) {
            int is_last = m + 1 == e->num_maps;
            for (size_t i = 0; i < num_rows * width; i += LANES)
                store(input + i, vector_max(load(input + i), splat(0))); /* ReLU */
            apply_map(e->maps + m, input, width, num_rows, 0, is_last ? u : output, e->maps[m].columns);
            float *previous_input = input;
            input = output, output = previous_input, width = e->maps[m].columns;
        }
    }
    if (e->time_map) apply_map(e->time_map, time_inputs, e->time_map->inputs, count, 1, first_token, d);
}

/* Compute the query tokens of the scored readings of the records from `from` to before `to`: z (scored readings, d).
 *
 * A query token is the embedding of its feature, plus a linear map of the Gaussian prior's conditional and of the time
 * inputs. inputs: (scored readings, inputs of query_map) these numbers, as `build_query_inputs` computes them; ignored
 * for a model without them. */
static void encode_queries(const TokenEncoder *e, size_t d, const Batch *batch, int64_t from, int64_t to,
                           const float *inputs, float *z) {
    float *out = z;
    for (int64_t i = from; i < to; i++)
        for (int64_t r = 0; r < batch->query_offsets[i + 1] - batch->query_offsets[i]; r++, out += d)
            memcpy(out, e->identity + batch->features[query_place(batch, i, r)] * d, d * sizeof *out);
    if (e->query_map) apply_map(e->query_map, inputs, e->query_map->inputs, (out - z) / d, 1, z, d);
}
#endif
