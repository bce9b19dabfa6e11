// What a call of the lightning indexer names (K3.1 spec 2.8).
#pragma once
#include "cache.h"

namespace k31 {

struct IndexerCall {
    Operand query;
    Operand key;
    Operand weights;
    Paging paging;
    Lengths lengths;
    Mask mask;
    int64_t heads;
    int64_t width;
    int64_t count;
    int64_t by_score;
    int64_t fill_lowest;
    int64_t threads;
    int32_t* result;
    int64_t failed;
};

}  // namespace k31
