// SPDX-License-Identifier: GPL-2.0

//! Walks a numbered tree that a lock protects, one step at a time, with the lock free between the steps.

use kernel::rbtree::RBTree;

/// The first entry of a tree whose number is `from` or more.
pub(crate) fn at_or_after<T: Clone>(tree: &RBTree<u64, T>, from: u64) -> Option<(u64, T)> {
    let cursor = tree.cursor_lower_bound(&from)?;
    let (&number, value) = cursor.current();
    Some((number, value.clone()))
}

/// Calls `f` with each entry, in the order of numbers. `next` takes the lock and finds the entry at or after a number;
/// `f` runs without it. Entries that come meanwhile may be missed.
pub(crate) fn one_by_one<T>(next: impl Fn(u64) -> Option<(u64, T)>, mut f: impl FnMut(&T)) {
    let mut from = 0;
    while let Some((number, value)) = next(from) {
        f(&value);
        // The last number there can be is the end.
        let Some(following) = number.checked_add(1) else {
            return;
        };
        from = following;
    }
}
