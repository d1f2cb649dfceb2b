"""The journal of a run: a record of the samples, the loss and the gradient norm of each step.

`TorchTrainer.fit` writes the journal to the folder `journal` in the run's folder. The journal is plain data, and small:
16 bytes for each batch number, and one line for each leg and each checkpoint. Each worker numbers its batches from 1
over all epochs, so a batch number stands for one batch on every worker. A leg is a part of an epoch that one group of
workers ran. The journal does not list samples, because their order follows from a seed and the number of the epoch. The
line of a leg says where in that order the leg starts, and how its samples are divided over the workers.

`journal.jsonl` has one JSON object per line:

- `run`: a program starts or resumes the run. The line has the program's config and options.
- `leg`: a group of workers starts to train after a step. Earlier lines about later steps are then no longer valid.
- `checkpoint`: a checkpoint was saved after a step.
- `left_out`: a callback such as `Guard` left a step out, so the optimizer did not step.
- `gap`: reports about some steps were lost, so their records may be missing or incomplete.

`steps.bin` has one record per batch number. All fields are little-endian floating-point numbers:

- loss (8 bytes): the mean over all samples of the step that ends with this batch;
- norm (4 bytes): the norm of the step's gradients, or the largest norm if there are several optimizers. -1 if no norm
  was recorded;
- weight (4 bytes): the weight of the mean, such as the number of samples. 0 if no step ends with this batch, and -1 if
  the step has no loss.

`steps.crc` has the checksums of blocks of 256 records: see `raysgd.journal.steps`. Earlier versions wrote no such file.

This package writes and reads the journal. `raysgd.replay` finds the samples of a step and repeats steps. Runs without a
folder import neither package.
"""
