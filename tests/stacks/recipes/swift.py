# fast_vision.py
from swift import TrainerCallback, callbacks_map

import hf_vit_accel


class PatchTower(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        hf_vit_accel.patch(model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        print(hf_vit_accel.status(model))


callbacks_map["patch_tower"] = PatchTower
