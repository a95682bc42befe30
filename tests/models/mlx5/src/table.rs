// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tables of objects, indexed by object number.

/// A table that assigns numbers to objects. A number is reused as late as possible, so that a late doorbell or packet
/// for a destroyed object does not reach a new one.
#[derive(Debug)]
pub(super) struct Table<T> {
    first: u32,
    limit: u32,
    next: u32,
    used: u32,
    slots: Vec<Option<Box<T>>>,
}

impl<T> Table<T> {
    /// Creates an empty table for `limit` objects. Numbers start at `first`.
    pub(super) fn new(first: u32, limit: u32) -> Self {
        Self {
            first,
            limit,
            next: 0,
            used: 0,
            slots: Vec::new(),
        }
    }

    /// Adds an object and returns its number. Returns `None` if the table is full.
    pub(super) fn add(&mut self, object: T) -> Option<u32> {
        if self.used >= self.limit {
            return None;
        }
        loop {
            let index = self.next as usize;
            self.next = (self.next + 1) % self.limit;
            if index >= self.slots.len() {
                self.slots.push(None);
            }
            if let Some(slot @ None) = self.slots.get_mut(index) {
                *slot = Some(Box::new(object));
                self.used += 1;
                // Not truncated: below `limit`.
                return Some(self.first + index as u32);
            }
        }
    }

    fn slot(&self, number: u32) -> Option<usize> {
        number.checked_sub(self.first).map(|index| index as usize)
    }

    /// Returns the object with this number.
    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(self.slot(number)?)?.as_deref()
    }

    /// Returns the object with this number for modification.
    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.as_deref_mut()
    }

    /// Removes an object and returns it.
    pub(super) fn remove(&mut self, number: u32) -> Option<T> {
        let slot = self.slot(number)?;
        let object = self.slots.get_mut(slot)?.take()?;
        self.used -= 1;
        Some(*object)
    }

    /// Returns the number of objects.
    pub(super) fn len(&self) -> usize {
        self.used as usize
    }

    /// Iterates over all objects and their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots
            .iter()
            .zip(self.first..)
            .filter_map(|(slot, number)| Some((number, slot.as_deref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_number_is_not_reused_at_once() {
        let mut table = Table::new(16, 4);
        let numbers: Vec<_> = (0..5).map(|object| table.add(object)).collect();
        assert_eq!(numbers, [Some(16), Some(17), Some(18), Some(19), None]);
        assert_eq!(table.remove(18), Some(2));
        assert_eq!(table.remove(18), None);
        assert_eq!(table.remove(17), Some(1));
        assert_eq!((table.get(15), table.get(17), table.get(20)), (None, None, None));
        assert_eq!(table.add(7), Some(17));
        table.remove(17);
        assert_eq!(table.add(8), Some(18), "17 was assigned last");
        *table.get_mut(18).unwrap() += 1;
        assert_eq!(table.iter().collect::<Vec<_>>(), [(16, &0), (18, &9), (19, &3)]);
        assert_eq!(table.len(), 3);
    }
}
