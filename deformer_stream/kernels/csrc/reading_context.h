/* The contexts of irregular readings: codes, values and times of the earlier readings of a record.
 *
 * The KV cache holds them at the end of each page, after the keys and values: KV_PAGE_TOKENS ages as doubles, then as
 * many values as floats, then as many feature codes as int32_t. If a reading has two tokens, the places of its second
 * token are not used. While a record is scored, its context lies in scratch memory, in the order of the readings.
 *
 * This file also computes the inputs of the network that express the times of readings. They are those of
 * model/time_inputs.py, which is the reference. */
#ifndef READING_CONTEXT_H
#define READING_CONTEXT_H
#include "token_encoder.h"

/* The context of a record, in order of arrival. The arrays are longer than any context by at least PRIOR_LANES. */
typedef struct {
    double *ages;      /* seconds from the origin of the record */
    double *residuals; /* value minus the mean of its feature, clipped; 0 if the process lacks the feature */
    double *inverse_deviations; /* 1 / standard deviation of the feature's readings; 0 if the process lacks it */
    int32_t *codes;    /* feature codes; always valid, also after the last reading */
} ReadingContext;

/* Return the address of the ages in a page; the values and the codes of its readings follow them. */
INLINE char *readings_of_page(const Batch *batch, char *page) {
    return page + batch->page_bytes - KV_PAGE_TOKENS * READING_BYTES;
}

/* Return the address of the page that holds the first token of a record's reading k, and write the token's place. */
INLINE char *page_of_reading(const Network *net, const Batch *batch, int64_t record, int64_t k, int64_t *place) {
    int64_t token = k * net->tokens_per_reading;
    *place = token % KV_PAGE_TOKENS;
    return page_address(batch, record, token / KV_PAGE_TOKENS);
}

/* Put a reading into the context as number k. */
static void put_reading(const Process *process, ReadingContext *context, int64_t k, int64_t code, double age,
                        float value) {
    context->ages[k] = age, context->codes[k] = (int32_t)code;
    if (!process) return;
    double inverse_deviation = process->inverse_deviations[code], residual = value - process->means[code];
    int has_prior = inverse_deviation > 0;
    context->inverse_deviations[k] = inverse_deviation;
    /* An outlier must not distort the distributions of the readings after it. */
    context->residuals[k] = has_prior ? fmin(fmax(residual, -MAX_NEIGHBOR_VALUE), MAX_NEIGHBOR_VALUE) : 0;
}

/* Read the cached reading k of a record from its pages into the context. */
static void load_reading(const Network *net, const Batch *batch, int64_t record, int64_t k, ReadingContext *context) {
    int64_t place;
    const char *readings = readings_of_page(batch, page_of_reading(net, batch, record, k, &place));
    const double *ages = (const double *)readings;
    const float *values = (const float *)(ages + KV_PAGE_TOKENS);
    const int32_t *codes = (const int32_t *)(values + KV_PAGE_TOKENS);
    put_reading(net->process, context, k, codes[place], ages[place], values[place]);
}

/* Write a reading into the pages of its record as number k. */
static void write_reading(const Network *net, const Batch *batch, int64_t record, int64_t k, int64_t code, double age,
                          float value) {
    int64_t place;
    char *readings = readings_of_page(batch, page_of_reading(net, batch, record, k, &place));
    double *ages = (double *)readings;
    float *values = (float *)(ages + KV_PAGE_TOKENS);
    int32_t *codes = (int32_t *)(values + KV_PAGE_TOKENS);
    ages[place] = age, values[place] = value, codes[place] = (int32_t)code;
}

/* Prefetch the cached readings of a record, so that they are in the processor's cache when the record is computed. */
static void prefetch_readings(const Network *net, const Batch *batch, int64_t record) {
    for (int64_t column = 0; column * KV_PAGE_TOKENS < batch->num_cached[record] * net->tokens_per_reading; column++) {
        const char *readings = readings_of_page(batch, page_address(batch, record, column));
        for (int64_t i = 0; i < KV_PAGE_TOKENS * READING_BYTES; i += 64) __builtin_prefetch(readings + i, 0, 2);
    }
}

/* Compute the inputs of the network that express the time of a reading: out (num_inputs).
 *
 * count: the number of earlier readings in the context. */
static void encode_time(const TimeScales *scales, const ReadingContext *context, int64_t count, int64_t code,
                        double reading_age, float *out) {
    double age = fmin(fmax(reading_age * scales->durations_per_second, -MAX_AGE), MAX_AGE), gap = 0;
    int64_t octaves = scales->num_octaves, previous = count - 1;
    while (previous >= 0 && context->codes[previous] != code) previous--;
    if (previous >= 0) gap = (reading_age - context->ages[previous]) * scales->resolutions_per_second;
    out[0] = (float)age;
    for (int64_t k = 0; k < octaves; k++) {
        double angle = 2 * M_PI * age * (double)(1 << k);
        out[1 + k] = (float)sin(angle), out[1 + octaves + k] = (float)cos(angle);
    }
    float *of_gap = out + 1 + 2 * octaves;
    of_gap[0] = (float)(copysign(log1p(fabs(gap)), gap) / scales->largest_log_gap);
    of_gap[1] = previous >= 0, of_gap[2] = previous >= 0 && gap == 0;
}
#endif
