-- Grain: one row a candidate maximum length. Key: max_length, ascending. Drops nothing.
-- Inputs: $shards, list of samples.parquet; $max_lengths, list of candidates.
-- What a shorter maximum length would cost: samples over it, and tokens that cutting or rejecting them would lose.
SELECT
    candidate.max_length::BIGINT AS max_length,
    count(*) FILTER (WHERE sequence_length > candidate.max_length)::BIGINT AS num_samples_over,
    coalesce(sum(greatest(sequence_length - candidate.max_length, 0)), 0)::BIGINT AS tokens_lost_by_cutting,
    coalesce(sum(sequence_length) FILTER (WHERE sequence_length > candidate.max_length), 0)::BIGINT
        AS tokens_lost_by_rejecting,
    coalesce(sum(sequence_length), 0)::BIGINT AS num_tokens
FROM read_parquet($shards, union_by_name = true)
CROSS JOIN (SELECT unnest($max_lengths) AS max_length) AS candidate
GROUP BY candidate.max_length
ORDER BY candidate.max_length
