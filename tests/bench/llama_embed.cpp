// Vectors by llama.cpp as its server computes them, without HTTP: for tests.bench.encoders (--llama).
//
//     g++ -O2 -shared -fPIC -fopenmp tests/bench/llama_embed.cpp -o llama_embed.so -I LLAMA/include \
//         -I LLAMA/ggml/include BUILD/src/libllama.a BUILD/ggml/src/libggml.a BUILD/ggml/src/libggml-cpu.a \
//         BUILD/ggml/src/libggml-base.a
//
// LLAMA: the source; BUILD: its build, with -DCMAKE_POSITION_INDEPENDENT_CODE=ON.

#include <cstdint>
#include <cstring>

#include "llama.h"

namespace {

// The tokens of a batch: the server's default (n_ubatch).
constexpr int kBatch = 512;

struct Embedder {
    llama_model * model;
    llama_context * context;
};

}  // namespace

extern "C" {

// Null if the file cannot be read.
void * embedder_open(const char * path, int threads) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == nullptr) return nullptr;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = kBatch;
    params.n_seq_max = 64;
    params.n_threads = params.n_threads_batch = threads;
    params.embeddings = true;
    params.kv_unified = true;
    llama_context * context = llama_init_from_model(model, params);
    return context == nullptr ? nullptr : new Embedder{model, context};
}

int embedder_width(void * handle) { return llama_model_n_embd(static_cast<Embedder *>(handle)->model); }

// Writes the pooled row of each text, fp32 [texts, width]. `ids`: of all texts, one after another. 0 if all went well.
int embedder_run(void * handle, const int32_t * ids, const int32_t * lengths, int texts, float * out) {
    auto & [model, context] = *static_cast<Embedder *>(handle);
    const int width = llama_model_n_embd(model);
    llama_batch batch = llama_batch_init(kBatch, 0, 1);
    int status = 0;
    for (int first = 0; first < texts && status == 0;) {
        batch.n_tokens = 0;
        int last = first;
        for (; last < texts && batch.n_tokens + lengths[last] <= kBatch && last - first < 64; ++last) {
            for (int at = 0; at < lengths[last]; ++at) {
                const int token = batch.n_tokens++;
                batch.token[token] = *ids++;
                batch.pos[token] = at;
                batch.n_seq_id[token] = 1;
                batch.seq_id[token][0] = last - first;
                batch.logits[token] = 1;
            }
        }
        if (last == first) {
            status = -1;
            break;
        }
        llama_memory_clear(llama_get_memory(context), true);
        status = llama_encode(context, batch);
        for (int text = first; text < last && status == 0; ++text) {
            const float * row = llama_get_embeddings_seq(context, text - first);
            if (row == nullptr) return -2;
            std::memcpy(out + static_cast<int64_t>(text) * width, row, width * sizeof(float));
        }
        first = last;
    }
    llama_batch_free(batch);
    return status;
}

}  // extern "C"
