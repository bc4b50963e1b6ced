-- Grain: one row that changes when any length, source, supervision or split changes; the order of rows does not matter.
-- Input: $shards, list of samples.parquet. A sum of hashes, not their exclusive or: that would cancel equal rows in pairs.
SELECT
    count(*)::VARCHAR AS num_samples,
    coalesce(
        sum(hash(sequence_length, source, num_supervised_tokens, num_eligible_anchors, is_validation)::HUGEINT), 0
    )::VARCHAR AS sum_of_hashes
FROM read_parquet($shards, union_by_name = true)
