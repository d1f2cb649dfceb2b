"""Ray 1.x: two models, two optimizers, a loop of one's own; the package under another name."""

import ray.util.sgd.torch as sgd
import torch
from ray.util.sgd.torch.torch_trainer import TorchTrainer


class Chase(sgd.TrainingOperator):
    def setup(self, config):
        models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        self.models, self.optimizers = self.register(models=models, optimizers=optimizers)
        self.model = self.models[0]
        x = torch.linspace(-1, 1, 64).reshape(-1, 1)
        self.register_data(train_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), 8))

    def train_batch(self, batch, batch_info):
        x, y = batch
        leader, follower = self.models
        lead, follow = self.optimizers
        lead.zero_grad()
        loss = ((leader(x) - y) ** 2).mean()
        loss.backward()
        lead.step()
        follow.zero_grad()
        behind = ((follower(x) - leader(x).detach()) ** 2).mean()
        behind.backward()
        follow.step()
        return {"loss": loss.item() + behind.item(), "num_samples": len(x)}


trainer = TorchTrainer(training_operator_cls=Chase, num_workers=2)
for _ in range(3):
    print("loss", trainer.train()["loss"])
trainer.shutdown()
