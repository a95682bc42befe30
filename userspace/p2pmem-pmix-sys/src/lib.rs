// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of PMIx by which the ranks of a job find each other, loaded at run time.
