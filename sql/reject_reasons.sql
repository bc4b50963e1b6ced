-- Grain: one row a reason. Key: reason; most frequent first. Input: $rejects, list of rejects.parquet. Drops nothing.
SELECT reason, count(*)::BIGINT AS num_rows, min(line)::BIGINT AS first_line
FROM read_parquet($rejects, union_by_name = true)
GROUP BY reason
ORDER BY num_rows DESC, reason
