// SPDX-License-Identifier: MIT OR Apache-2.0

//! The directory of a job that `mpirun` or `srun --mpi=pmix` started.
