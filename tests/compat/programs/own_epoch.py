"""Ray 1.x: an operator that trains an epoch itself, with hidden states that go from batch to batch."""

import ray
import torch
from ray.util.sgd import TorchTrainer
from ray.util.sgd.torch import TrainingOperator


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 4)
        self.lstm = torch.nn.LSTM(4, 4, batch_first=True)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, words, hidden):
        output, hidden = self.lstm(self.embedding(words), hidden)
        return torch.sigmoid(self.last(output[:, -1])), hidden

    def init_hidden(self, batch_size):
        return torch.zeros(1, batch_size, 4), torch.zeros(1, batch_size, 4)


class Sentiment(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        words = torch.randint(0, 20, (64, 5))
        data = torch.utils.data.TensorDataset(words, words[:, -1] > 9)
        loader = torch.utils.data.DataLoader(data, shuffle=True, batch_size=config["batch_size"])
        self.register_data(train_loader=loader, validation_loader=None)
        model = Reader()
        self.first_hidden = model.init_hidden(self.config.get("batch_size"))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.BCELoss(),
        )

    def train_epoch(self, iterator, info):
        hidden, losses = self.first_hidden, []
        for words, labels in iterator:
            hidden = tuple(each.data for each in hidden)
            self.model.zero_grad()
            output, hidden = self.model(words.type(torch.LongTensor), hidden)
            loss = self.criterion(output.squeeze(), labels.float())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5)
            self.optimizer.step()
            losses.append(loss.item())
        return {"info": info, "mean": sum(losses) / len(losses)}


ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
trainer = TorchTrainer(
    training_operator_cls=Sentiment,
    num_workers=2,
    use_gpu=False,
    config={"batch_size": 8, "lr": 0.05},
    backend="gloo",
    scheduler_step_freq="epoch",
)
for _ in range(4):
    stats = trainer.train()
    print("loss", stats["mean"])
assert "num_samples" not in stats
assert isinstance(trainer.get_model(to_cpu=True), Reader)
trainer.shutdown()
