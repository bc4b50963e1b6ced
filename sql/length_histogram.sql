-- Grain: one row a sequence length that occurs. Key: sequence_length, ascending.
-- Input: $shards, list of samples.parquet. Drops validation samples: edges and plans see training samples only.
SELECT sequence_length, count(*) AS num_samples
FROM read_parquet($shards, union_by_name = true)
WHERE NOT is_validation
GROUP BY sequence_length
ORDER BY sequence_length
