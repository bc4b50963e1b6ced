-- Grain: one row, no key. It changes with any length, source, supervision or split, not with the rows' order.
-- Inputs: $shards, list of samples.parquet; $validation_bound, keys below it are validation samples.
-- A sum of hashes, not their exclusive or: that would cancel equal rows in pairs.
SELECT
    count(*)::VARCHAR AS num_samples,
    coalesce(
        sum(
            hash(
                sequence_length, source, num_supervised_tokens, num_eligible_anchors,
                validation_key < $validation_bound
            )::HUGEINT
        ),
        0
    )::VARCHAR AS sum_of_hashes
FROM read_parquet($shards, union_by_name = true, hive_partitioning = false)
