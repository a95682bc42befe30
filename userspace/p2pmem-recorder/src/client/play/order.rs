// SPDX-License-Identifier: MIT OR Apache-2.0

//! The order of a playback from several storage nodes. Each node announces its blocks in ascending order. Together they are played in
//! ascending order too, and a block that several nodes have is played once.

use std::collections::VecDeque;

use anyhow::{ensure, Result};

use crate::store::Block;

/// A block in a buffer of a storage node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    /// The number of the node.
    pub node: usize,
    /// The number of the node's buffer.
    pub buffer: u32,
}

/// What one node has announced.
#[derive(Debug, Default)]
struct Announcements {
    /// Blocks that are not taken: the round, the block, and the node's buffer.
    waiting: VecDeque<(u64, Block, u32)>,
    first: Option<u64>,
    last: Option<u64>,
    /// How often the node has started again.
    round: u64,
    count: u64,
    ended: bool,
}

/// The announcements of all nodes. A node that has failed is `None`.
#[derive(Debug)]
pub(super) struct Order {
    nodes: Vec<Option<Announcements>>,
    repeat: bool,
    /// The round of the block that was taken last.
    round: u64,
    /// The round and the number of the last block that a node announced which failed before its end.
    lost: Option<(u64, u64)>,
}

/// A block whose turn it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Taken {
    /// The block.
    pub block: Block,
    /// Whether playback starts again with this block.
    pub starts_again: bool,
    /// Where the block is.
    pub copies: Vec<Copy>,
}

impl Order {
    /// Returns the order of blocks of `nodes` nodes. With `repeat`, a node may announce its first block after its last one.
    pub(super) fn new(nodes: usize, repeat: bool) -> Self {
        Self {
            nodes: (0..nodes).map(|_| Some(Announcements::default())).collect(),
            repeat,
            round: 0,
            lost: None,
        }
    }

    /// A node has announced a block.
    ///
    /// # Errors
    ///
    /// The block does not follow the one before.
    pub(super) fn announced(&mut self, node: usize, block: Block, buffer: u32) -> Result<()> {
        let Some(of) = &mut self.nodes[node] else { return Ok(()) };
        ensure!(!of.ended, "the node announced a block after the last one");
        if let Some(last) = of.last.filter(|last| block.sequence <= *last) {
            let starts_again = self.repeat && of.first == Some(block.sequence);
            ensure!(starts_again, "block {} follows block {last}", block.sequence);
            of.round += 1;
        }
        of.first.get_or_insert(block.sequence);
        of.last = Some(block.sequence);
        of.count += 1;
        of.waiting.push_back((of.round, block, buffer));
        Ok(())
    }

    /// A node has no further block, after `blocks` blocks.
    ///
    /// # Errors
    ///
    /// It announced another number of blocks.
    pub(super) fn ended(&mut self, node: usize, blocks: u64) -> Result<()> {
        let Some(of) = &mut self.nodes[node] else { return Ok(()) };
        ensure!(
            blocks == of.count,
            "the node announced {blocks} blocks, and {} announcements arrived",
            of.count
        );
        of.ended = true;
        Ok(())
    }

    /// A node has failed.
    pub(super) fn lost(&mut self, node: usize) {
        if let Some(of) = self.nodes[node].take().filter(|of| !of.ended) {
            self.lost = self.lost.max(of.last.map(|last| (of.round, last)));
        }
    }

    /// Returns the last block that a node announced which failed, if no other node has announced as much: the others end too early.
    pub(super) fn missing_end(&self) -> Option<u64> {
        let others = self.nodes.iter().flatten();
        let most = others.filter_map(|of| of.last.map(|last| (of.round, last))).max();
        self.lost
            .filter(|lost| Some(*lost) > most)
            .map(|(_, sequence)| sequence)
    }

    /// Whether all blocks of a node are taken, and a further one may come. Nothing can be taken until it comes, or the node ends.
    pub(super) fn waits_for(&self, node: usize) -> bool {
        self.nodes[node]
            .as_ref()
            .is_some_and(|of| !of.ended && of.waiting.is_empty())
    }

    /// Whether all blocks of all nodes are taken.
    pub(super) fn is_finished(&self) -> bool {
        self.nodes.iter().flatten().all(|of| of.ended && of.waiting.is_empty())
    }

    /// Takes the next block. Returns `None` if a node may still announce an earlier one, or there is none.
    ///
    /// # Errors
    ///
    /// Two nodes have different blocks with one sequence number.
    pub(super) fn take(&mut self) -> Result<Option<Taken>> {
        if (0..self.nodes.len()).any(|node| self.waits_for(node)) {
            return Ok(None);
        }
        let heads = self.nodes.iter().flatten().filter_map(|of| of.waiting.front());
        let Some(&(round, block, _)) = heads.min_by_key(|(round, block, _)| (*round, block.sequence)) else {
            return Ok(None);
        };
        let mut copies = Vec::new();
        for (node, of) in self.nodes.iter_mut().enumerate() {
            let Some(of) = of else { continue };
            let same = |head: &(u64, Block, u32)| (head.0, head.1.sequence) == (round, block.sequence);
            if let Some((_, other, buffer)) = of.waiting.front().copied().filter(same) {
                ensure!(
                    other.checksum == block.checksum,
                    "storage nodes have different blocks {}: the channel has recordings of different programs, select one of each \
                     node by --recording",
                    block.sequence
                );
                of.waiting.pop_front();
                copies.push(Copy { node, buffer });
            }
        }
        let starts_again = std::mem::replace(&mut self.round, round) != round;
        Ok(Some(Taken {
            block,
            starts_again,
            copies,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(sequence: u64) -> Block {
        Block {
            sequence,
            time: 0,
            checksum: sequence as u32,
        }
    }

    /// Announces blocks of a node, with their sequence numbers as buffers, and its end.
    fn announce(order: &mut Order, node: usize, sequences: &[u64]) {
        for sequence in sequences {
            order.announced(node, block(*sequence), *sequence as u32).unwrap();
        }
        order.ended(node, sequences.len() as u64).unwrap();
    }

    /// Takes all blocks that can be taken: their sequence numbers, and the nodes that have them.
    fn taken(order: &mut Order) -> Vec<(u64, Vec<usize>)> {
        let mut all = Vec::new();
        while let Some(Taken { block, copies, .. }) = order.take().unwrap() {
            assert!(copies.iter().all(|copy| u64::from(copy.buffer) == block.sequence));
            all.push((block.sequence, copies.iter().map(|copy| copy.node).collect()));
        }
        all
    }

    #[test]
    fn stripes_are_merged() {
        let mut order = Order::new(2, false);
        announce(&mut order, 1, &[1, 3, 4]);
        // The other node may have an earlier block.
        assert!(order.waits_for(0) && taken(&mut order).is_empty());
        announce(&mut order, 0, &[0, 2, 6]);
        let expected = [(0, 0), (1, 1), (2, 0), (3, 1), (4, 1), (6, 0)];
        assert_eq!(
            taken(&mut order),
            expected.map(|(sequence, node)| (sequence, vec![node]))
        );
        assert!(order.is_finished());
    }

    #[test]
    fn copies_of_a_mirror_are_taken_together() {
        let mut order = Order::new(3, false);
        announce(&mut order, 0, &[0, 1, 2]);
        announce(&mut order, 1, &[1, 2, 3]);
        announce(&mut order, 2, &[]);
        let expected = vec![(0, vec![0]), (1, vec![0, 1]), (2, vec![0, 1]), (3, vec![1])];
        assert_eq!(taken(&mut order), expected);
    }

    #[test]
    fn a_lost_node_is_not_waited_for() {
        let mut order = Order::new(2, false);
        order.announced(0, block(5), 5).unwrap();
        announce(&mut order, 1, &[4, 6]);
        assert_eq!(order.take().unwrap().unwrap().block.sequence, 4);
        order.lost(0);
        assert_eq!(taken(&mut order), [(6, vec![1])]);
        assert!(order.is_finished());
        assert_eq!(order.missing_end(), None, "the other node has announced block 6");
        // What arrives of it later is ignored.
        order.announced(0, block(1), 1).unwrap();
        order.ended(0, 9).unwrap();
    }

    #[test]
    fn an_end_that_only_a_lost_node_had_is_missed() {
        let mut order = Order::new(2, false);
        announce(&mut order, 1, &[0, 1, 2]);
        for sequence in 0..5 {
            order.announced(0, block(sequence), sequence as u32).unwrap();
        }
        assert_eq!(taken(&mut order).len(), 5);
        order.lost(0);
        assert!(order.is_finished());
        assert_eq!(order.missing_end(), Some(4));
        // A node that ended had no further block.
        let mut order = Order::new(2, false);
        announce(&mut order, 0, &[0, 1]);
        announce(&mut order, 1, &[0]);
        order.lost(0);
        assert_eq!(order.missing_end(), None);
    }

    #[test]
    fn playback_starts_again_with_the_first_block_of_a_round() {
        let mut order = Order::new(2, true);
        // The first node's copy of block 0 is lost with it. The other one begins with block 1.
        for (sequence, buffer) in [(0, 0), (1, 1), (2, 2), (0, 3)] {
            order.announced(0, block(sequence), buffer).unwrap();
        }
        announce(&mut order, 1, &[1, 2, 1, 2]);
        let mut seen = Vec::new();
        for count in 0..6 {
            if count == 2 {
                order.lost(0);
            }
            let Some(taken) = order.take().unwrap() else { break };
            seen.push((taken.block.sequence, taken.starts_again));
        }
        assert_eq!(seen, [(0, false), (1, false), (2, false), (1, true), (2, false)]);
    }

    #[test]
    fn rounds_of_all_nodes_follow_each_other() {
        let mut order = Order::new(2, true);
        announce(&mut order, 0, &[0, 2, 0, 2]);
        announce(&mut order, 1, &[1, 3, 1]);
        let sequences: Vec<u64> = taken(&mut order).into_iter().map(|(sequence, _)| sequence).collect();
        assert_eq!(sequences, [0, 1, 2, 3, 0, 1, 2]);
    }

    #[test]
    fn wrong_announcements_are_refused() {
        let mut order = Order::new(2, false);
        order.announced(0, block(3), 0).unwrap();
        let why = order.announced(0, block(3), 1).unwrap_err().to_string();
        assert_eq!(why, "block 3 follows block 3");
        assert!(order
            .ended(0, 2)
            .unwrap_err()
            .to_string()
            .contains("1 announcements arrived"));
        order.ended(0, 1).unwrap();
        assert!(order.announced(0, block(4), 1).is_err());
        // Another program's block with the same number.
        let other = Block {
            checksum: 99,
            ..block(3)
        };
        order.announced(1, other, 0).unwrap();
        assert!(order.take().unwrap_err().to_string().contains("different blocks 3"));
        // With repetition, only the first block may follow the last one.
        let mut order = Order::new(1, true);
        order.announced(0, block(3), 0).unwrap();
        order.announced(0, block(5), 1).unwrap();
        assert!(order.announced(0, block(4), 2).is_err());
        order.announced(0, block(3), 2).unwrap();
    }
}
