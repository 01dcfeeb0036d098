"""Trainings with Lightning Fabric, as a script has them."""

import os

import torch
from lightning.fabric import Fabric

import limpet
from tests.frameworks.harness import reach
from tests.frameworks.samples import Images, make_model


def train(run, *, accumulation=1, num_workers=0, epochs=3):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    loader = limpet.DataLoader(Images(), batch_size=4, shuffle=True, num_workers=num_workers)
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    batches = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with limpet.Checkpointer(run, state, save=limpet.EverySteps(2)) as ckpt:
        for epoch in ckpt.epochs(epochs):
            waiting = 0
            for batch in batches:
                waiting += 1
                is_step = waiting == accumulation or loader.batch + 1 == len(loader)
                with fabric.no_backward_sync(model, enabled=not is_step):
                    loss = model(batch).square().mean()
                    fabric.backward(loss)
                if is_step:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    ckpt.step({"loss": loss}, batches=waiting)
                    waiting = 0
            reach(f"end of epoch {epoch}")
    print("steps:", ckpt.current_step)
