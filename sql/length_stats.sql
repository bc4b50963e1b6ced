-- Grain: one row, no key. Input: length_counts. Drops nothing; quantiles are of all samples.
-- Quantile q is the shortest length that at least a share q of the samples does not exceed.
WITH lengths AS (
    SELECT sequence_length, sum(num_samples) AS num_samples
    FROM length_counts
    GROUP BY sequence_length
),

shares AS (
    SELECT
        sequence_length,
        sum(num_samples) OVER (ORDER BY sequence_length) / sum(num_samples) OVER () AS share
    FROM lengths
)

SELECT
    coalesce(sum(num_samples), 0)::BIGINT AS num_samples,
    coalesce(sum(num_samples) FILTER (WHERE is_validation), 0)::BIGINT AS num_validation_samples,
    coalesce(sum(sequence_length * num_samples), 0)::BIGINT AS num_tokens,
    coalesce(sum(num_supervised_tokens), 0)::BIGINT AS num_supervised_tokens,
    coalesce(sum(num_eligible_anchors), 0)::BIGINT AS num_eligible_anchors,
    min(sequence_length) AS min_length,
    sum(sequence_length * num_samples) / sum(num_samples) AS mean_length,
    (SELECT min(sequence_length) FROM shares WHERE share >= 0.5) AS median_length,
    (SELECT min(sequence_length) FROM shares WHERE share >= 0.9) AS p90_length,
    (SELECT min(sequence_length) FROM shares WHERE share >= 0.99) AS p99_length,
    max(sequence_length) AS max_length
FROM length_counts
