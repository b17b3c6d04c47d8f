"""Stand-in: where Megatron builds its data iterators."""

from megatron.training import get_args


def get_train_valid_test_num_samples():
    args = get_args()
    num_evaluations = args.train_iters // args.eval_interval + 1
    return (
        args.train_iters * args.global_batch_size,
        num_evaluations * args.eval_iters * args.global_batch_size,
        args.eval_iters * args.global_batch_size,
    )


def build_train_valid_test_data_iterators(provider):
    args = get_args()
    iterators = provider(get_train_valid_test_num_samples())
    args.do_train, args.do_valid, args.do_test = (iterator is not None for iterator in iterators)
    return iterators
