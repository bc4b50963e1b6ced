"""Environment variables that keep other packages from sending usage data, in one place.

The command line sets them before it imports any of these packages, and child processes inherit them.
`prefect.yaml` and the Makefile repeat them for processes that start elsewhere; a test compares.
"""

NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
