"""Training in classes."""

FRAMES = {
    "trainer_class": """
@dataclass
class Config:
    lr: float = 0.01
    epochs: int = 2
    keep: int = 2

class Trainer:
    def __init__(self, model, cfg, train, valid):
        self.cfg = cfg
        self.device = device
        self.model = model.to(self.device)
        self.train_loader = train
        self.valid = valid
        self.step = 0
        self.opt = self.configure()
        self.sched = optim.lr_scheduler.CosineAnnealingLR(self.opt, len(train) * cfg.epochs)
        self.saved = []

    def configure(self):
        decay, no = (set(), set())
        for mn, m in self.model.named_modules():
            for pn, p in m.named_parameters(recurse=False):
                full = f"{mn}.{pn}" if mn else pn
                (decay if pn.endswith("weight") and isinstance(m, nn.Linear) else no).add(full)
        d = dict(self.model.named_parameters())
        return optim.AdamW(
            [
                dict(params=[d[n] for n in sorted(decay)], weight_decay=0.1),
                dict(params=[d[n] for n in sorted(no)], weight_decay=0.0),
            ],
            lr=self.cfg.lr,
        )

    def training_step(self, batch):
        x, y = (t.to(self.device) for t in batch)
        return F.cross_entropy(self.model(x), y)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        c = n = 0
        for x, y in self.valid:
            c += (self.model(x).argmax(1) == y).sum().item()
            n += len(x)
        self.model.train()
        return c / n

    def fit(self):
        for ep in range(self.cfg.epochs):
            for batch in self.train_loader:
                loss = self.training_step(batch)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.sched.step()
                self.opt.zero_grad(set_to_none=True)
                self.step += 1
                record["losses"].append(loss.item())
            record["valid"].append(self.evaluate())
            self.save(f"ck{self.step}.pt")

    def save(self, p):
        torch.save(
            dict(model=self.model.state_dict(), opt=self.opt.state_dict(), sched=self.sched.state_dict()), p
        )
        self.saved.append(p)
        while len(self.saved) > self.cfg.keep:
            os.remove(self.saved.pop(0))

X = torch.randn(40, 6)
Y = (X.sum(1) > 0).long()
ds = TensorDataset(X, Y)
tr, va = random_split(ds, [32, 8])
t = Trainer(
    nn.Sequential(nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 2)),
    Config(epochs=3),
    LOADER(tr),
    DataLoader(va, 4),
)
t.fit()
torch.save(t.model.state_dict(), "model.pt")
""",
    "hf_output": """
class Out(OrderedDict):
    def __getattr__(self, k):
        return self[k]

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 12)
        self.layers = nn.ModuleList(
            (nn.TransformerEncoderLayer(12, 2, 24, 0.1, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        h = self.emb(input_ids)
        pad = None if attention_mask is None else attention_mask == 0
        for l in self.layers:
            h = l(h, src_key_padding_mask=pad)
        lg = self.head(h)
        o = Out(logits=lg)
        if labels is not None:
            o["loss"] = F.cross_entropy(
                lg[:, :-1].reshape(-1, 20), labels[:, 1:].reshape(-1), ignore_index=-100
            )
        return o

ids = torch.randint(0, 20, (ROWS, 8))
mask = torch.ones(ROWS, 8, dtype=torch.long)
for i in range(ROWS):
    mask[i, 3 + i % 6 :] = 0

class DS(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {
            "input_ids": ids[i],
            "attention_mask": mask[i],
            "labels": ids[i].masked_fill(mask[i] == 0, -100),
        }

model = LM()
model.to(device)
opt = OPTIMIZER(model.parameters())
for ep in range(EPOCHS):
    for step, batch in enumerate(LOADER(DS())):
        batch = {k: v.to(device) for k, v in batch.items()}
        out = model(**batch)
        loss = out.loss / 2
        loss.backward()
        record["losses"].append(loss.item())
        if step % 2 == 1:
            opt.step()
            opt.zero_grad()
torch.save(model.state_dict(), "model.pt")
""",
    "lightning_like": """
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(6, WIDTH, 2)
        self.crit = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.log_ = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, b, i):
        x, y = b
        l = self.crit(self(x), y)
        self.log_.append(l.item())
        return l

    def validation_step(self, b, i):
        x, y = b
        return self.crit(self(x), y)

    def configure_optimizers(self):
        o = OPTIMIZER(self.parameters())
        return ([o], [optim.lr_scheduler.StepLR(o, 1)])

X = torch.randn(ROWS, 6)
Y = torch.randint(0, 2, (ROWS,))
tr = LOADER(TensorDataset(X, Y))
m = Module().to(device)
os_, ss = m.configure_optimizers()
for ep in range(EPOCHS):
    m.train()
    for i, b in enumerate(tr):
        l = m.training_step(b, i)
        os_[0].zero_grad()
        l.backward()
        os_[0].step()
        record["losses"].append(l.item())
    ss[0].step()
    m.eval()
    with torch.no_grad():
        record["valid"].append(
            sum((m.validation_step(b, 0).item() for b in DataLoader(TensorDataset(X, Y), 8)))
        )
torch.save(m.state_dict(), "model.pt")
""",
    "seq2seq_tutorial": """
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(15, 8)
        self.g = nn.GRU(8, 8, batch_first=True)
        self.d = nn.Dropout(0.1)

    def forward(self, x):
        return self.g(self.d(self.e(x)))

class Dec(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(15, 8)
        self.g = nn.GRU(8, 8, batch_first=True)
        self.o = nn.Linear(8, 15)

    def forward(self, eo, eh, target=None):
        inp = torch.empty(eo.size(0), 1, dtype=torch.long, device=device).fill_(0)
        h = eh
        outs = []
        for i in range(5):
            o, h = self.g(F.relu(self.e(inp)), h)
            o = self.o(o)
            outs.append(o)
            inp = target[:, i : i + 1] if target is not None else o.topk(1)[1].squeeze(-1).detach()
        return (F.log_softmax(torch.cat(outs, 1), -1), h)

I = torch.randint(0, 15, (ROWS, 5))
T = I.flip(1)
enc, dec = (Enc().to(device), Dec().to(device))
oe, od = (OPTIMIZER(enc.parameters()), OPTIMIZER(dec.parameters()))
crit = nn.NLLLoss()
loader = DataLoader(TensorDataset(I, T), batch_size=BATCH, sampler=RandomSampler(TensorDataset(I, T)))
for ep in range(EPOCHS):
    for a, b in loader:
        oe.zero_grad()
        od.zero_grad()
        eo, eh = enc(a)
        tf = b if random.random() < 0.5 else None
        o, _ = dec(eo, eh, tf)
        loss = crit(o.view(-1, o.size(-1)), b.view(-1))
        loss.backward()
        oe.step()
        od.step()
        record["losses"].append(loss.item())
torch.save([enc.state_dict(), dec.state_dict()], "model.pt")
""",
}
