// SPDX-License-Identifier: MIT OR Apache-2.0

//! Part of the group of ranks.
