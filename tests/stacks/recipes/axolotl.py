# fast_vision.py
from axolotl.integrations.base import BasePlugin

import hf_vit_accel


class PatchTower(BasePlugin):
    def post_trainer_create(self, cfg, trainer):
        hf_vit_accel.patch(trainer.model)
