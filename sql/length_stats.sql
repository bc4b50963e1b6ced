-- Grain: one row. Drops nothing; quantiles are of all samples.
-- Inputs: $shards, list of samples.parquet; $validation_bound, keys below it are validation samples.
SELECT
    count(*)::BIGINT AS num_samples,
    count(*) FILTER (WHERE validation_key < $validation_bound)::BIGINT AS num_validation_samples,
    coalesce(sum(sequence_length), 0)::BIGINT AS num_tokens,
    coalesce(sum(num_supervised_tokens), 0)::BIGINT AS num_supervised_tokens,
    coalesce(sum(num_eligible_anchors), 0)::BIGINT AS num_eligible_anchors,
    min(sequence_length)::BIGINT AS min_length,
    avg(sequence_length) AS mean_length,
    quantile_disc(sequence_length, 0.5)::BIGINT AS median_length,
    quantile_disc(sequence_length, 0.9)::BIGINT AS p90_length,
    quantile_disc(sequence_length, 0.99)::BIGINT AS p99_length,
    max(sequence_length)::BIGINT AS max_length
FROM read_parquet($shards, union_by_name = true)
