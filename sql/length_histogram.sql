-- Grain: one row a sequence length that occurs. Key: sequence_length, ascending.
-- Inputs: $shards, list of samples.parquet; $validation_bound, keys below it are validation samples.
-- Drops validation samples: edges and plans see training samples only.
SELECT sequence_length::BIGINT AS sequence_length, count(*)::BIGINT AS num_samples
FROM read_parquet($shards, union_by_name = true)
WHERE validation_key >= $validation_bound
GROUP BY sequence_length
ORDER BY sequence_length
