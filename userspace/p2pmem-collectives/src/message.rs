// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages between two ranks: the immediate data of writes, and the announcement by which a rank enters a call.

use serde::{Deserialize, Serialize};

use crate::schedule::{Call, Collective};

/// Bytes of an announcement in memory, with its length.
pub const ANNOUNCEMENT: usize = 256;
/// Bits of a number of tasks.
const TASK_BITS: u32 = 24;
const TASKS: u64 = 1 << TASK_BITS;

/// The immediate data of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Immediate {
    /// A piece of the payload, for the task with this number of the sender's connection.
    Piece {
        /// The lowest bits of the task's number.
        task: u32,
        /// The round.
        round: u8,
    },
    /// The sender executes the tasks below this number: others may send pieces for them.
    Open {
        /// The lowest bits of the number.
        tasks: u32,
    },
    /// The sender enters a call; the announcement is in memory. Also an [`Immediate::Open`].
    Enter {
        /// The lowest bits of the number.
        tasks: u32,
    },
}

impl Immediate {
    /// Returns a piece's message.
    pub fn piece(task: u64, round: u8) -> Self {
        Self::Piece { task: low(task), round }
    }

    /// Returns the number.
    pub fn encode(self) -> u32 {
        match self {
            Self::Piece { task, round } => (u32::from(round) << TASK_BITS) | task,
            Self::Open { tasks } => (1 << 30) | tasks,
            Self::Enter { tasks } => (2 << 30) | tasks,
        }
    }

    /// Returns the message of a number; `None` if no message has it.
    pub fn decode(number: u32) -> Option<Self> {
        let tasks = number & (TASKS as u32 - 1);
        let round = (number >> TASK_BITS) as u8 & 0x3f;
        match (number >> 30, round) {
            (0, round) => Some(Self::Piece { task: tasks, round }),
            (1, 0) => Some(Self::Open { tasks }),
            (2, 0) => Some(Self::Enter { tasks }),
            _ => None,
        }
    }
}

/// Returns the lowest bits of a number of tasks.
pub fn low(tasks: u64) -> u32 {
    (tasks % TASKS) as u32
}

/// Returns the number with these lowest bits that is nearest to `near`.
pub fn whole(low: u32, near: u64) -> u64 {
    let up = u64::from(low).wrapping_sub(near) % TASKS;
    if up < TASKS / 2 {
        near + up
    } else {
        (near + up).saturating_sub(TASKS)
    }
}

/// What a rank says when it enters a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// Number of the call, from 1.
    pub number: u64,
    /// The call.
    pub call: Call,
    /// Most bytes of a piece.
    pub chunk: u64,
}

impl Announcement {
    /// Returns the announcement as it is written to memory.
    pub fn encode(&self) -> [u8; ANNOUNCEMENT] {
        let mut bytes = [0; ANNOUNCEMENT];
        let text = serde_json::to_vec(self).unwrap_or_default();
        let len = text.len().min(ANNOUNCEMENT - 2);
        bytes[..2].copy_from_slice(&(len as u16).to_le_bytes());
        bytes[2..2 + len].copy_from_slice(&text[..len]);
        bytes
    }

    /// Reads an announcement; `None` if the bytes are none.
    pub fn decode(bytes: &[u8; ANNOUNCEMENT]) -> Option<Self> {
        let len = usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
        serde_json::from_slice(bytes.get(2..2 + len)?).ok()
    }

    /// Describes the call.
    pub fn describe(&self) -> String {
        let Call {
            collective,
            element,
            reduction,
            at,
            bytes,
            root,
        } = &self.call;
        let mut text = format!("call {}: {}", self.number, collective.name());
        if let Collective::Allreduce(algorithm) = collective {
            text += &format!(" ({})", algorithm.name());
        }
        text += &format!(" of {bytes} bytes of {} at offset {at}", element.name());
        if collective.reduces() {
            text += &format!(", {}", reduction.name());
        }
        text + &format!(", root {root}, in chunks of {} bytes", self.chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Element, Reduction};
    use crate::schedule::Algorithm;

    #[test]
    fn immediate_data_has_every_message() {
        let all = [
            Immediate::piece((1 << 24) + 5, 63),
            Immediate::Open { tasks: 0xff_ffff },
            Immediate::Enter { tasks: 7 },
        ];
        for message in all {
            assert_eq!(Immediate::decode(message.encode()), Some(message));
        }
        for number in [3 << 30, (1 << 30) | (1 << 24), (2 << 30) | (1 << 29)] {
            assert_eq!(Immediate::decode(number), None);
        }
    }

    #[test]
    fn numbers_are_whole_near_another_one() {
        for near in [0, 5, TASKS - 1, TASKS, 3 * TASKS + 77] {
            for number in [
                near,
                near + 1,
                near + 4096,
                near.saturating_sub(1),
                near.saturating_sub(4096),
            ] {
                assert_eq!(whole(low(number), near), number, "near {near}");
            }
        }
    }

    #[test]
    fn the_longest_announcement_fits() {
        let announcement = Announcement {
            number: u64::MAX,
            call: Call {
                collective: Collective::Allreduce(Algorithm::ParameterServer),
                element: Element::Bf16,
                reduction: Reduction::Max,
                at: u64::MAX,
                bytes: u64::MAX,
                root: usize::MAX,
            },
            chunk: u64::MAX,
        };
        assert_eq!(
            Announcement::decode(&announcement.encode()).as_ref(),
            Some(&announcement)
        );
        assert_eq!(Announcement::decode(&[0xff; ANNOUNCEMENT]), None);
        assert!(announcement
            .describe()
            .contains("allreduce (parameter-server) of 18446744073709551615 bytes of bf16"));
    }
}
