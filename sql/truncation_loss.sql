-- Grain: one row per candidate maximum length. Key: max_length, ascending. Drops nothing.
-- Inputs: length_counts; $max_lengths, list of candidates.
-- Cost of a shorter maximum length: samples over it, and tokens that cutting or rejecting them would lose.
WITH lengths AS (
    SELECT sequence_length, sum(num_samples) AS num_samples
    FROM length_counts
    GROUP BY sequence_length
)

SELECT
    candidate.max_length::BIGINT AS max_length,
    coalesce(sum(num_samples) FILTER (WHERE sequence_length > candidate.max_length), 0)::BIGINT
        AS num_samples_over,
    coalesce(sum(greatest(sequence_length - candidate.max_length, 0) * num_samples), 0)::BIGINT
        AS tokens_lost_by_cutting,
    coalesce(
        sum(sequence_length * num_samples) FILTER (WHERE sequence_length > candidate.max_length), 0
    )::BIGINT AS tokens_lost_by_rejecting,
    coalesce(sum(sequence_length * num_samples), 0)::BIGINT AS num_tokens
FROM lengths
CROSS JOIN (SELECT unnest($max_lengths) AS max_length) AS candidate
GROUP BY candidate.max_length
ORDER BY candidate.max_length
