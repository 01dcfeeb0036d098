"""An evaluation that counts the records, whatever the version holds."""


def setup(snapshot):
    return len(snapshot.keys())


def evaluate(model, batch):
    return {"leaves": (model * len(batch), len(batch))}


def data():
    return [*range(100)]
