-- Grain: one row a source. Key: source, ascending. Input: $shards, list of samples.parquet. Drops nothing.
SELECT
    source,
    count(*)::BIGINT AS num_samples,
    sum(sequence_length)::BIGINT AS num_tokens,
    sum(num_supervised_tokens)::BIGINT AS num_supervised_tokens,
    avg(sequence_length) AS mean_length,
    quantile_disc(sequence_length, 0.5)::BIGINT AS median_length,
    quantile_disc(sequence_length, 0.9)::BIGINT AS p90_length,
    quantile_disc(sequence_length, 0.99)::BIGINT AS p99_length,
    max(sequence_length)::BIGINT AS max_length
FROM read_parquet($shards, union_by_name = true)
GROUP BY source
ORDER BY source
