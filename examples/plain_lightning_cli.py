"""Lightning's own command line with GEM, for those who want to choose everything themselves.

python examples/plain_lightning_cli.py fit --config configs/tiny.yaml
"""

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_gem.data import RecDataModule
from lightning_gem.models import GEMModule


class CLI(LightningCLI):
    """Links the features of the data to the model; all else is Lightning's."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the link."""
        parser.link_arguments("data.schema", "model.schema", apply_on="instantiate")


if __name__ == "__main__":
    CLI(GEMModule, RecDataModule, subclass_mode_data=True, save_config_kwargs={"overwrite": True})
