// SPDX-License-Identifier: MIT OR Apache-2.0

//! Registers of BAR0: the initialization segment, and the doorbells in the user access regions (UARs).
//!
//! The thread that serves the emulator answers register accesses and never blocks. Work goes to an inbox.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use super::inbox::{Inboxes, Message};
use super::layout::{constants, wire};

/// Size of BAR0 in bytes.
pub(super) const BAR0_SIZE: u64 = 16 << 20;
/// Number of MSI-X vectors.
pub const VECTORS: u16 = 16;
/// Offset of the MSI-X table in BAR0, after the initialization segment.
pub(super) const MSIX_TABLE: u32 = 0x4000;
/// Offset of the MSI-X pending bit array in BAR0.
pub(super) const MSIX_PBA: u32 = 0x5000;
/// Size of a UAR page in bytes.
pub(super) const UAR_SIZE: u64 = 4096;
/// First UAR page that can be allocated. The pages before it contain registers.
pub(super) const FIRST_UAR: u32 = 16;
/// Number of UAR pages that can be allocated.
pub(super) const UARS: u32 = (BAR0_SIZE / UAR_SIZE) as u32 - FIRST_UAR;

/// Firmware version.
pub(super) const FIRMWARE: (u16, u16, u16) = (20, 99, 1);
/// Command interface revision that the driver requires.
const COMMAND_REVISION: u32 = 5;
/// Logarithms of the number of command queue entries and of the entry size in bytes.
pub(super) const LOG_COMMAND_ENTRIES: u32 = 5;
pub(super) const LOG_COMMAND_STRIDE: u32 = 6;
/// Period of the health counter.
const HEALTH_TICK_MS: u128 = 100;

/// Byte offsets of registers, from the generated layout.
mod reg {
    use super::wire::{health_buffer, init_seg};

    const fn bytes(field: crate::layout::Field) -> u64 {
        field.offset() as u64 / 8
    }

    pub(super) const FW_REV: u64 = bytes(init_seg::FW_REV);
    pub(super) const CMDIF_REV: u64 = bytes(init_seg::CMDIF_REV_FW_SUB);
    pub(super) const CMDQ_HIGH: u64 = bytes(init_seg::CMDQ_ADDR_H);
    pub(super) const CMDQ_LOW: u64 = bytes(init_seg::CMDQ_ADDR_L_SZ);
    pub(super) const CMD_DOORBELL: u64 = bytes(init_seg::CMD_DBELL);
    pub(super) const INITIALIZING: u64 = bytes(init_seg::INITIALIZING);
    pub(super) const HEALTH_FW_VER: u64 = init_seg::HEALTH.offset() as u64 + bytes(health_buffer::FW_VER);
    pub(super) const HEALTH_HW_ID: u64 = init_seg::HEALTH.offset() as u64 + bytes(health_buffer::HW_ID);
    pub(super) const HEALTH_SEVERITY: u64 = init_seg::HEALTH.offset() as u64 + bytes(health_buffer::RFR_SEVERITY);
    pub(super) const HEALTH_SYNDROME: u64 = init_seg::HEALTH.offset() as u64 + bytes(health_buffer::IRISC_INDEX);
    pub(super) const TIMER_HIGH: u64 = bytes(init_seg::INTERNAL_TIMER_H);
    pub(super) const TIMER_LOW: u64 = bytes(init_seg::INTERNAL_TIMER_L);
    pub(super) const HEALTH_COUNTER: u64 = bytes(init_seg::HEALTH_COUNTER);
}

/// Byte offsets of doorbells in a UAR page. The headers do not define the two EQ doorbells.
mod doorbell {
    use super::constants;

    pub(super) const CQ: u64 = constants::MLX5_CQ_DOORBELL as u64;
    pub(super) const EQ_ARM: u64 = 0x40;
    pub(super) const EQ: u64 = 0x48;
    pub(super) const SEND: u64 = constants::MLX5_BF_OFFSET as u64;
}

/// Values of `nic_interface` in the initialization segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum NicInterface {
    /// Full driver: commands and doorbells are accepted.
    Full = 0,
    /// Disabled.
    Disabled = 1,
    /// The driver requests a software reset.
    SoftwareReset = 7,
}

/// Registers, shared by the serving thread and the workers.
#[derive(Debug)]
pub(super) struct Registers {
    started: Instant,
    queue_high: AtomicU32,
    queue_low: AtomicU32,
    interface: AtomicU8,
    initialising: AtomicBool,
    /// If not 0, the health counter stays at this value.
    frozen_health_counter: AtomicU32,
    /// Syndrome in the health buffer.
    syndrome: AtomicU8,
    /// Number of reads, writes, and accesses to unknown registers.
    reads: AtomicU64,
    writes: AtomicU64,
    bad: AtomicU64,
}

impl Registers {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            queue_high: AtomicU32::new(0),
            queue_low: AtomicU32::new(0),
            interface: AtomicU8::new(NicInterface::Full as u8),
            initialising: AtomicBool::new(false),
            frozen_health_counter: AtomicU32::new(0),
            syndrome: AtomicU8::new(0),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            bad: AtomicU64::new(0),
        }
    }

    /// Returns the adapter's clock: nanoseconds since the device was created.
    pub(super) fn clock(&self) -> u64 {
        // Not truncated: 64 bits hold 584 years.
        self.started.elapsed().as_nanos() as u64
    }

    /// Returns the number of reads, writes, and accesses to unknown registers.
    pub(super) fn counts(&self) -> [u64; 3] {
        [&self.reads, &self.writes, &self.bad].map(|counter| counter.load(Ordering::Relaxed))
    }

    /// Sets the access counters to 0.
    pub(super) fn reset_counts(&self) {
        for counter in [&self.reads, &self.writes, &self.bad] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    /// Resets the registers and sets `initializing`, which [`Registers::ready`] clears. If a command queue was set, the
    /// interface becomes disabled: a driver that did not request the reset recognizes it only by this.
    pub(super) fn reset(&self) {
        self.queue_high.store(0, Ordering::Relaxed);
        if self.queue_low.swap(0, Ordering::Relaxed) != 0 {
            self.set_interface(NicInterface::Disabled);
        }
        self.frozen_health_counter.store(0, Ordering::Relaxed);
        self.syndrome.store(0, Ordering::Relaxed);
        self.initialising.store(true, Ordering::SeqCst);
    }

    /// Clears `initializing`: the adapter accepts commands.
    pub(super) fn ready(&self) {
        self.initialising.store(false, Ordering::SeqCst);
    }

    /// Sets `nic_interface`.
    pub(super) fn set_interface(&self, interface: NicInterface) {
        self.interface.store(interface as u8, Ordering::SeqCst);
    }

    /// Returns whether commands and doorbells are accepted.
    pub(super) fn enabled(&self) -> bool {
        self.interface.load(Ordering::SeqCst) == NicInterface::Full as u8 && self.syndrome.load(Ordering::SeqCst) == 0
    }

    /// Makes the adapter fail until the next reset of the function: the health counter stops, the health buffer holds
    /// `syndrome`, which must not be 0, and requests a reset, and commands and doorbells are ignored.
    pub(super) fn fail(&self, syndrome: u8) {
        let (counter, _) = self.health();
        self.frozen_health_counter.store(counter.max(1), Ordering::SeqCst);
        self.syndrome.store(syndrome, Ordering::SeqCst);
    }

    fn health(&self) -> (u32, u8) {
        let frozen_health_counter = self.frozen_health_counter.load(Ordering::SeqCst);
        let ticks = self.started.elapsed().as_millis() / HEALTH_TICK_MS;
        // Truncated on purpose: the counter wraps around.
        let counter = if frozen_health_counter == 0 {
            ticks as u32 & 0x00ff_ffff
        } else {
            frozen_health_counter
        };
        (counter, self.syndrome.load(Ordering::SeqCst))
    }

    /// Returns the register at `offset`, a multiple of 4. `None` if the offset is unknown.
    fn word(&self, offset: u64) -> Option<u32> {
        let (major, minor, sub) = FIRMWARE;
        let version = (u32::from(major) << 24) | (u32::from(minor) << 16) | u32::from(sub);
        Some(match offset {
            reg::FW_REV => (u32::from(minor) << 16) | u32::from(major),
            reg::CMDIF_REV => (COMMAND_REVISION << 16) | u32::from(sub),
            reg::CMDQ_HIGH => self.queue_high.load(Ordering::Relaxed),
            reg::CMDQ_LOW => {
                let interface = u32::from(self.interface.load(Ordering::SeqCst));
                let size = (LOG_COMMAND_ENTRIES << 4) | LOG_COMMAND_STRIDE;
                self.queue_low.load(Ordering::Relaxed) | (interface << constants::MLX5_NIC_IFC_OFFSET) | size
            }
            reg::CMD_DOORBELL => 0,
            reg::INITIALIZING => u32::from(self.initialising.load(Ordering::SeqCst)) << 31,
            reg::HEALTH_FW_VER => version,
            reg::HEALTH_HW_ID => u32::from(super::DEVICE_ID),
            // Bit 31 (rfr) requests a reset.
            reg::HEALTH_SEVERITY => u32::from(self.health().1 != 0) << 31,
            reg::HEALTH_SYNDROME => u32::from(self.health().1) << 16,
            reg::TIMER_HIGH => (self.clock() >> 32) as u32,
            reg::TIMER_LOW => self.clock() as u32,
            reg::HEALTH_COUNTER => self.health().0,
            // The rest of the initialization segment and the UAR pages read as zeros.
            _ if offset < wire::init_seg::BYTES as u64 => 0,
            _ if offset >= u64::from(FIRST_UAR) * UAR_SIZE => 0,
            _ => return None,
        })
    }

    /// Handles a read of any length and alignment.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let mut known = true;
        let mut last = (u64::MAX, [0; 4]);
        for (byte, at) in data.iter_mut().zip(offset..) {
            let word = at & !3;
            if last.0 != word {
                let value = self.word(word);
                known &= value.is_some();
                last = (word, value.unwrap_or(0).to_be_bytes());
            }
            *byte = last.1[(at & 3) as usize];
        }
        if !known {
            self.bad.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Handles a write of any length and alignment. Counts it as bad unless it is an aligned write to a known register.
    pub(super) fn write(&self, offset: u64, data: &[u8], inbox: &Inboxes) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let done = if offset >= u64::from(FIRST_UAR) * UAR_SIZE {
            self.write_uar(offset, data, inbox)
        } else if let Ok(bytes) = <[u8; 4]>::try_from(data) {
            self.write_word(offset, u32::from_be_bytes(bytes), inbox)
        } else if let Some((high, low)) = data.split_first_chunk::<4>() {
            let low = <[u8; 4]>::try_from(low);
            low.is_ok_and(|low| {
                self.write_word(offset, u32::from_be_bytes(*high), inbox)
                    && self.write_word(offset + 4, u32::from_be_bytes(low), inbox)
            })
        } else {
            false
        };
        if !done {
            self.bad.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn write_word(&self, offset: u64, value: u32, inbox: &Inboxes) -> bool {
        match offset {
            reg::CMDQ_HIGH => self.queue_high.store(value, Ordering::Relaxed),
            reg::CMDQ_LOW => {
                self.queue_low.store(value & 0xffff_f000, Ordering::Relaxed);
                let wanted = (value >> constants::MLX5_NIC_IFC_OFFSET) as u8 & 7;
                if wanted == NicInterface::SoftwareReset as u8 {
                    self.interface.store(wanted, Ordering::SeqCst);
                    inbox.put(Message::SoftwareReset);
                } else if wanted <= NicInterface::Disabled as u8 {
                    self.interface.store(wanted, Ordering::SeqCst);
                }
            }
            reg::CMD_DOORBELL => {
                let high = u64::from(self.queue_high.load(Ordering::Relaxed)) << 32;
                let queue = high | u64::from(self.queue_low.load(Ordering::Relaxed));
                if self.enabled() {
                    inbox.put(Message::Command { queue, entries: value });
                }
            }
            _ => return false,
        }
        true
    }

    /// Handles a write to a UAR page. Returns false if the write is no doorbell.
    fn write_uar(&self, offset: u64, data: &[u8], inbox: &Inboxes) -> bool {
        if !self.enabled() {
            return false;
        }
        // Not truncated: BAR0 has 4096 UAR pages.
        let uar = (offset / UAR_SIZE) as u32;
        let word = |at: usize| {
            let bytes = data.get(at..at + 4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
            bytes.map(u32::from_be_bytes)
        };
        let message = match (offset % UAR_SIZE, word(0), word(4), data.len()) {
            (at @ (doorbell::EQ_ARM | doorbell::EQ), Some(value), None, 4) => Message::EqDoorbell {
                uar,
                eqn: (value >> 24) as u8,
                consumer: value & 0x00ff_ffff,
                arm: at == doorbell::EQ_ARM,
            },
            (doorbell::CQ, Some(first), Some(second), 8) => Message::ArmCq {
                uar,
                words: [first, second],
            },
            // The first 8 bytes of a control segment. The driver may write the whole WQE; the adapter reads it from the
            // queue.
            (doorbell::SEND.., Some(_), Some(second), _) if offset % 256 == 0 => {
                Message::SendDoorbell { uar, qpn: second >> 8 }
            }
            _ => return false,
        };
        inbox.put(message);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inbox::Wait;
    use proptest::prelude::*;

    fn messages(inbox: &Inboxes) -> Vec<Message> {
        let mut messages = Vec::new();
        inbox.commands.take(&mut messages, Wait::No);
        let mut others = Vec::new();
        inbox.transport.take(&mut others, Wait::No);
        messages.extend(others);
        messages
    }

    fn read(registers: &Registers, offset: u64) -> u32 {
        let mut data = [0; 4];
        registers.read(offset, &mut data);
        u32::from_be_bytes(data)
    }

    #[test]
    fn command_queue_and_doorbell() {
        let (registers, inbox) = (Registers::new(), Inboxes::default());
        assert_eq!(read(&registers, 0x14) & 0xff, 0x56);
        registers.write(0x10, &[0, 0, 0, 1], &inbox);
        registers.write(0x14, &[0x12, 0x34, 0x50, 0x00], &inbox);
        assert_eq!((read(&registers, 0x10), read(&registers, 0x14)), (1, 0x1234_5056));
        registers.write(0x18, &[0x80, 0, 0, 1], &inbox);
        match messages(&inbox)[..] {
            [Message::Command { queue, entries }] => assert_eq!((queue, entries), (0x1_1234_5000, 0x8000_0001)),
            ref other => panic!("{other:?}"),
        }
        registers.write(0x14, &[0, 0, 1, 0], &inbox);
        assert_eq!(read(&registers, 0x14), 0x156, "the interface is disabled");
        registers.write(0x18, &[0, 0, 0, 1], &inbox);
        assert!(messages(&inbox).is_empty(), "a disabled adapter accepts no commands");
    }

    #[test]
    fn reset_disables_command_interface() {
        let (registers, inbox) = (Registers::new(), Inboxes::default());
        let interface = |registers: &Registers| (read(registers, 0x14) >> 8) & 7;
        registers.reset();
        assert_eq!(
            interface(&registers),
            0,
            "no command queue was set, so the interface stays enabled"
        );
        registers.write(0x14, &[0x12, 0x34, 0x50, 0x00], &inbox);
        registers.reset();
        assert_eq!((interface(&registers), registers.enabled()), (1, false));
        registers.reset();
        assert_eq!(
            interface(&registers),
            1,
            "no command queue was set since the last reset"
        );
        registers.write(0x14, &[0x12, 0x34, 0x50, 0x00], &inbox);
        assert_eq!((interface(&registers), registers.enabled()), (0, true));
    }

    #[test]
    fn doorbells_are_decoded() {
        let (registers, inbox) = (Registers::new(), Inboxes::default());
        let uar = 17 * UAR_SIZE;
        registers.write(uar + 0x40, &[3, 0, 1, 2], &inbox);
        registers.write(uar + 0x48, &[3, 0, 1, 2], &inbox);
        registers.write(uar + 0x20, &[1, 0, 0, 5, 0, 0, 0, 9], &inbox);
        registers.write(uar + 0x900, &[0, 0, 0, 10, 0, 1, 2, 4], &inbox);
        let all = messages(&inbox);
        assert!(matches!(
            all[..],
            [
                Message::EqDoorbell {
                    uar: 17,
                    eqn: 3,
                    consumer: 0x102,
                    arm: true
                },
                Message::EqDoorbell { arm: false, .. },
                Message::ArmCq {
                    uar: 17,
                    words: [0x0100_0005, 9]
                },
                Message::SendDoorbell { uar: 17, qpn: 0x102 },
            ]
        ));
        assert_eq!(registers.bad.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn health_counter_stops_on_failure() {
        let registers = Registers::new();
        assert_eq!(read(&registers, reg::INITIALIZING), 0);
        registers.fail(7);
        let counter = read(&registers, 0x1010);
        let tick = 2_000_000 * HEALTH_TICK_MS as u64;
        let start = registers.clock();
        while registers.clock() < start + tick {
            std::thread::yield_now();
        }
        assert_eq!(read(&registers, 0x1010), counter);
        assert_eq!((read(&registers, reg::HEALTH_SYNDROME) >> 16) & 0xff, 7);
        assert_eq!(read(&registers, reg::HEALTH_SEVERITY), 1 << 31);
        assert!(!registers.enabled());
        registers.reset();
        assert_eq!(read(&registers, reg::INITIALIZING), 1 << 31);
        assert_eq!(read(&registers, reg::HEALTH_SYNDROME), 0);
    }

    proptest! {
        /// No access panics, and a read returns the same bytes as single-byte reads.
        #[test]
        fn arbitrary_access_is_consistent(offset in 0..BAR0_SIZE, len in 1_usize..80, data: [u8; 80]) {
            let (registers, inbox) = (Registers::new(), Inboxes::default());
            registers.write(offset, &data[..len], &inbox);
            let mut whole = vec![0; len];
            registers.read(offset, &mut whole);
            if !(reg::TIMER_HIGH - 80..reg::HEALTH_COUNTER + 4).contains(&offset) {
                for (i, byte) in whole.iter().enumerate() {
                    let mut one = [0];
                    registers.read(offset + i as u64, &mut one);
                    prop_assert_eq!(one[0], *byte);
                }
            }
        }
    }
}
