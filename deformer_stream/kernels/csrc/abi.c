/* Functions that describe this library to Python, which compares the description with its own declarations; and the
 * function with which each thread begins. */
#include "abi.h"

/* Return the version of the interface between Python and this library. */
int64_t abi_version(void) { return ABI_VERSION; }

/* Return the size in bytes of the structure with this name, or -1 if there is none. */
int64_t struct_size(const char *name) {
#define SIZE_OF(type) {#type, sizeof(type)}
    static const struct { const char *name; int64_t size; } structs[] = {
        SIZE_OF(Layer), SIZE_OF(LinearMap), SIZE_OF(TokenEncoder), SIZE_OF(Prior), SIZE_OF(Process),
        SIZE_OF(TimeScales), SIZE_OF(Head), SIZE_OF(Network), SIZE_OF(Batch), SIZE_OF(SurprisalTask),
        SIZE_OF(QuantileTask), SIZE_OF(ProcessTask), SIZE_OF(RunningState), SIZE_OF(AdvanceTask), SIZE_OF(DistanceTask),
        SIZE_OF(ThreadTeam),
    };
    for (size_t i = 0; i < sizeof structs / sizeof *structs; i++)
        if (!strcmp(name, structs[i].name)) return structs[i].size;
    return -1;
}

/* Return the value of the constant with this name, or NaN if there is none. */
double constant_value(const char *name) {
#define VALUE_OF(constant) {#constant, constant}
    static const struct { const char *name; double value; } constants[] = {
        VALUE_OF(COLUMNS), VALUE_OF(KV_PAGE_TOKENS), VALUE_OF(MAX_HEADS), VALUE_OF(PRIOR_LANES),
        VALUE_OF(ROW_EXTRA_VECTORS), VALUE_OF(MAX_NEIGHBORS), VALUE_OF(MAX_PROCESS_SCALES),
        VALUE_OF(MAX_NEIGHBOR_VALUE), VALUE_OF(MAX_AGE), VALUE_OF(READING_BYTES), VALUE_OF(MAX_CONDITIONING_VALUE),
        VALUE_OF(LINEAR_LIMIT),
        VALUE_OF(MAX_LOG_SCALE_CHANGE), VALUE_OF(ACTIVATION_GELU), VALUE_OF(ACTIVATION_RELU),
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (!strcmp(name, constants[i].name)) return constants[i].value;
    return NAN;
}

/* Return how many factors of a matrix product are packed side by side: 2 for pairs of bfloat16, else 1. */
int64_t dot_width(void) { return DOT_WIDTH; }

/* Return the size in bytes of a number in the KV cache: 4 for float32, 2 for bfloat16. */
int64_t kv_item_bytes(void) { return sizeof(kv_t); }

/* Execute a thread's share of the work: call the function of the team, unless enough threads have called it before.
 *
 * Each thread calls this once. `calls_left` begins with the number of units of work, because a further thread would
 * allocate its scratch memory and then find no unit. */
void run_one_thread(ThreadTeam *team) {
    int64_t calls_left = __atomic_sub_fetch(&team->calls_left, 1, __ATOMIC_RELAXED);
    if (calls_left >= 0 && team->function(team->task) < 0) __atomic_store_n(&team->failed, 1, __ATOMIC_RELAXED);
}
