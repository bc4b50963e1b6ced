-- Grain: one row per source. Key: source, ascending. Input: length_counts. Drops nothing.
-- Quantiles as in length_stats.
WITH lengths AS (
    SELECT
        source,
        sequence_length,
        sum(num_samples) AS num_samples,
        sum(num_supervised_tokens) AS num_supervised_tokens
    FROM length_counts
    GROUP BY source, sequence_length
),

shares AS (
    SELECT
        *,
        sum(num_samples) OVER (PARTITION BY source ORDER BY sequence_length)
        / sum(num_samples) OVER (PARTITION BY source) AS share
    FROM lengths
)

SELECT
    source,
    sum(num_samples)::BIGINT AS num_samples,
    sum(sequence_length * num_samples)::BIGINT AS num_tokens,
    sum(num_supervised_tokens)::BIGINT AS num_supervised_tokens,
    sum(sequence_length * num_samples) / sum(num_samples) AS mean_length,
    min(sequence_length) FILTER (WHERE share >= 0.5) AS median_length,
    min(sequence_length) FILTER (WHERE share >= 0.9) AS p90_length,
    min(sequence_length) FILTER (WHERE share >= 0.99) AS p99_length,
    max(sequence_length) AS max_length
FROM shares
GROUP BY source
ORDER BY source
