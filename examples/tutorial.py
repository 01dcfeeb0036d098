"""The script of docs/tutorial.md: python tutorial.py RUN."""

import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import limpet

torch.manual_seed(0)
torch.set_num_threads(1)

# Images of 28 x 28 pixels. The label says which quarter of the columns is brighter.
labels = torch.arange(2400) % 4
images = torch.randn(2400, 1, 28, 28)
for label in range(4):
    images[labels == label, :, :, 7 * label : 7 * label + 7] += 0.2


class Images(Dataset):
    def __init__(self, numbers, augment=False):
        self.numbers, self.augment = numbers, augment

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        image = images[self.numbers[i]]
        if self.augment:
            image = image.roll(random.randrange(28), dims=1)
            image = image * np.random.uniform(0.8, 1.2) + 0.1 * torch.randn(image.shape)
        return image, labels[self.numbers[i]]


model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 5, stride=2),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(8 * 12 * 12, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
training = Images(range(2000), augment=True)
loader = limpet.DataLoader(training, batch_size=40, shuffle=True, num_workers=2)  # 1
validation = DataLoader(Images(range(2000, 2400)), batch_size=100)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}  # 2
ckpt = limpet.Checkpointer(sys.argv[1], state, save=limpet.EverySteps(40))  # 3


def accuracy():
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in validation)
    model.train()
    return correct / 400


for epoch in ckpt.epochs(4):  # 4
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ckpt.step({"loss": loss})  # 5
    score = accuracy()
    print(f"epoch {epoch}: accuracy {score:.3f}")
    ckpt.metrics({"accuracy": score})  # 6
ckpt.close()  # 7
