-- Grain: one row per source, side of the split and sequence length that occur together. Drops nothing.
-- Key: source, is_validation, sequence_length; in no order.
-- Inputs: $shards, list of samples.parquet; $validation_bound, keys below it are validation samples.
-- Paths decide no column: a directory may be named source=a.
-- The only scan of the samples: the other relations read its rows, a few thousand per source.
SELECT
    source,
    validation_key < $validation_bound AS is_validation,
    sequence_length::BIGINT AS sequence_length,
    count(*)::BIGINT AS num_samples,
    sum(num_supervised_tokens)::BIGINT AS num_supervised_tokens,
    sum(num_eligible_anchors)::BIGINT AS num_eligible_anchors
FROM read_parquet($shards, union_by_name = true, hive_partitioning = false)
GROUP BY ALL
