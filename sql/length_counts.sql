-- Grain: one row a source, side of the split and sequence length that occur together. Drops nothing.
-- Inputs: $shards, list of samples.parquet; $validation_bound, keys below it are validation samples.
-- Paths decide no column: a directory may be named source=a.
-- The one scan of the samples: the relations of the profile are made from its rows, a few thousand a source.
SELECT
    source,
    validation_key < $validation_bound AS is_validation,
    sequence_length::BIGINT AS sequence_length,
    count(*)::BIGINT AS num_samples,
    sum(num_supervised_tokens)::BIGINT AS num_supervised_tokens,
    sum(num_eligible_anchors)::BIGINT AS num_eligible_anchors
FROM read_parquet($shards, union_by_name = true, hive_partitioning = false)
GROUP BY ALL
