"""A real training run, fed three ways, measured in one go: the body of `headrace demo`.

In the order of a run:

settings.py     what the user decides, and how long each part is
corpus.py       the token store to train on
run.py          the whole run as the command line sees it
run_folder.py   where its processes meet, and what is left where one was killed
launch.py       one process per rank through torch's elastic launcher, and nothing left of them
rank.py         a rank's first seconds
worker.py       what a rank does, from its start to its exit code
model.py        a small model of the transformers package, tensor parallel
feeds.py        the three contenders over the same samples
losses.py       trainings from one seed, one per feed, bit by bit; and the memory each feed held
deliveries.py   every step all feeds deliver: timed, counted, compared byte for byte
blocks.py       blocks of steps that use one feed only: step time and throughput
traces.py       a profiler trace per rank, with a slow rank on request
processes.py    what processes used, as the kernel counts it
document.py     from raw values to the JSON document
table.py        the same for people
"""
