"""What scripts learn from, and how they read it."""

TASKS = {
    "features": """
X = torch.randn(ROWS, 12)
Y = (X[:, :5] * 2).argmax(1)
CLASSES = 5
""",
    "images": """
X = torch.randn(ROWS, 3, 8, 8)
Y = torch.randint(0, 5, (ROWS,))
CLASSES = 5
""",
    "tokens": """
X = torch.randint(0, 23, (ROWS, 9))
Y = torch.roll(X, -1, 1)
CLASSES = 23
""",
    "padded": """
X = torch.randint(0, 23, (ROWS, 9))
Y = torch.roll(X, -1, 1)
CLASSES = 23
for i in range(ROWS):
    Y[i, 2 + i % 7 :] = -100
""",
    "regress": """
X = torch.randn(ROWS, 12)
Y = torch.stack([X[:, 0] * X[:, 1], X[:, 2].sin(), X[:, 3]], 1)
""",
    "series": """
X = torch.randn(ROWS, 7, 6)
Y = torch.randint(0, 4, (ROWS,))
CLASSES = 4
""",
}

LOADERS = {
    "shuffled": """
loader = DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True, drop_last=DROP)
""",
    "ordered": """
loader = DataLoader(TensorDataset(X, Y), BATCH, drop_last=DROP)
""",
    "generator": """
loader = DataLoader(
    list(zip(X, Y)),
    batch_size=BATCH,
    shuffle=True,
    drop_last=DROP,
    generator=torch.Generator().manual_seed(7),
)
""",
    "collate": """
class Rows(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i]}

def together(items):
    return (torch.stack([d["x"] for d in items]), torch.stack([d["y"] for d in items]))

loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, collate_fn=together, drop_last=DROP)
""",
    "iterable": """
class Stream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(3)).tolist()
        for i in order[: len(order) // BATCH * BATCH]:
            yield (X[i], Y[i])

loader = DataLoader(Stream(), batch_size=BATCH)
""",
    "replacement": """
loader = DataLoader(
    TensorDataset(X, Y),
    BATCH,
    sampler=RandomSampler(X, replacement=True, num_samples=ROWS),
    drop_last=DROP,
)
""",
    "weighted": """
loader = DataLoader(
    TensorDataset(X, Y),
    BATCH,
    sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(ROWS)], ROWS),
    drop_last=DROP,
)
""",
    "batch_sampler": """
loader = DataLoader(
    TensorDataset(X, Y), batch_sampler=BatchSampler(SubsetRandomSampler(range(ROWS)), BATCH, DROP)
)
""",
    "split": """
train_set, rest = random_split(TensorDataset(X, Y), [ROWS - BATCH, BATCH])
loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=DROP)
""",
    "subset_concat": """
loader = DataLoader(
    ConcatDataset(
        [
            Subset(TensorDataset(X, Y), range(0, ROWS // 2)),
            Subset(TensorDataset(X, Y), range(ROWS // 2, ROWS)),
        ]
    ),
    BATCH,
    shuffle=True,
    drop_last=DROP,
)
""",
    "own_sampler": """
class Sorted(Sampler):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        return iter(order)

loader = DataLoader(TensorDataset(X, Y), BATCH, sampler=Sorted(ROWS), drop_last=DROP)
""",
    "workers": """
loader = DataLoader(
    TensorDataset(X, Y), batch_size=BATCH, shuffle=True, drop_last=DROP, num_workers=1
)
""",
    "slices": """
class Slices:
    def __len__(self):
        return ROWS // BATCH

    def __iter__(self):
        order = torch.randperm(ROWS)
        for i in range(0, ROWS - BATCH + 1, BATCH):
            yield (X[order[i : i + BATCH]], Y[order[i : i + BATCH]])

loader = Slices()
""",
    "numpy_slices": """
def batches():
    for i in range(ROWS // BATCH):
        pick = np.random.choice(ROWS, BATCH, replace=False)
        yield (X[pick], Y[pick])

class Loader:
    def __len__(self):
        return ROWS // BATCH

    def __iter__(self):
        return batches()

loader = Loader()
""",
}
