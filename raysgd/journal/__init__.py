"""The journal of a run: a record of each step's samples, loss and gradient norm.

`fit` writes the journal to `journal/` in the run's folder. It is plain data, and small: 16 bytes per step, and one line
for each leg. A leg is a part of an epoch that one group of workers ran. The journal does not list samples, because a
seed and the epoch number determine their order. The leg's line records where in that order the leg starts and how its
samples are sharded over the workers.

`journal.jsonl` has one JSON object per line:

- `run`: a program starts or resumes the run, with its config and options;
- `leg`: a group of workers starts to train at a step. This line invalidates earlier lines about later steps;
- `checkpoint`: a file was saved after a step.

`steps.bin` has one record per batch of a worker. All fields are little-endian floating-point numbers:

- loss (8 bytes): the mean over all samples of the step that ends with this batch;
- norm (4 bytes): the norm of the step's gradients, or -1 if nothing computed it;
- weight (4 bytes): the weight of the mean, such as the number of samples. 0 if no step ends with this batch, -1 if no
  loss counted in the step.

This package writes and reads the journal, independently of any framework. `raysgd.replay` finds the samples and repeats
steps. Runs without a folder import neither package.
"""
