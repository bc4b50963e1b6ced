"""Show samples as the drafter sees them: text, loss mask, anchors."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("preview-data"))

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import PreviewOptions
from flows.runtime.entry import run_flow
from tasks import preview
from tasks.reporting import tables
from tasks.storage.pointers import target_directory


@run_flow("preview-data")
def preview_data(config: RunConfig, options: PreviewOptions) -> dict[str, object]:
    """Return the rows of the token store that were shown."""
    from dflash_core.data.chat import load_tokenizer

    steps.check_options(options)
    target = steps.prepare_target(config, options)
    dataset = steps.ingest_all(config, options, target)
    directory = str(target_directory(config, target))
    tokenizer = load_tokenizer(directory, trust_remote_code=config.target.trust_remote_code)
    tables.print_table(f"{config.deployment}: data", preview.file_rows(dataset.pointers))
    rows = preview.show_samples(steps.open_store(config, dataset), tokenizer, config, options.limit)
    return {"rows": rows}
