-- Grain: one row per sequence length that occurs. Key: sequence_length, ascending. Input: length_counts.
-- Drops validation samples: edges and plans see training samples only.
SELECT sequence_length, sum(num_samples)::BIGINT AS num_samples
FROM length_counts
WHERE NOT is_validation
GROUP BY sequence_length
ORDER BY sequence_length
