-- Grain: one row an optimizer step. Key: step. Input: $metrics, list of a run's metrics.jsonl.
-- Drops lines without a training loss (validation, start). The last record of a step wins: a resumed run repeats some.
SELECT * EXCLUDE (position)
FROM (
    SELECT *, row_number() OVER (PARTITION BY step ORDER BY time_ms DESC) AS position
    FROM read_json($metrics, format = 'newline_delimited', union_by_name = true)
    WHERE "train/loss" IS NOT NULL
)
WHERE position = 1
ORDER BY step
