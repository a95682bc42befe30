// SPDX-License-Identifier: GPL-2.0

//! Iteration over an [`RBTree`] that a lock protects, without holding the lock between elements.
//!
//! The callback may sleep and may take any lock that the caller may take. The walk goes by number, so elements may come and
//! go meanwhile.

use kernel::rbtree::RBTree;

/// Returns the first element whose number is `from` or more, and its number.
pub(crate) fn at_or_after<T: Clone>(tree: &RBTree<u64, T>, from: u64) -> Option<(u64, T)> {
    let cursor = tree.cursor_lower_bound(&from)?;
    let (&number, value) = cursor.current();
    Some((number, value.clone()))
}

/// Calls `f` with each element in ascending order of numbers. `next` takes the lock and returns the first element at or
/// after a number; `f` runs without the lock. May miss elements that are added meanwhile.
pub(crate) fn one_by_one<T>(next: impl Fn(u64) -> Option<(u64, T)>, mut f: impl FnMut(&T)) {
    let mut from = 0;
    while let Some((number, value)) = next(from) {
        f(&value);
        // `u64::MAX` was the last possible number.
        let Some(following) = number.checked_add(1) else {
            return;
        };
        from = following;
    }
}
