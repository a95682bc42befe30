// SPDX-License-Identifier: GPL-2.0

//! When a function that has attachments to dma-bufs may do DMA: the state machine of its bus mastering.
//!
//! Bus mastering is enabled while the function has attachments. A mapping that ends although nobody has said that the
//! function stopped using it is *stale* if no IOMMU ends the access: the function may still write to the address, which
//! others may own soon. Bus mastering is disabled as long as there are stale mappings. If an IOMMU ends the access, the
//! mapping is only *unconfirmed*: a later attachment could get the same I/O address, so nobody can attach the function until
//! the end is confirmed. See "Attachments to dma-bufs" in Documentation/design/lifecycle.md.
//!
//! The file is pure: it needs nothing but `core`, allocates nothing, cannot panic, takes no lock, and has no `unsafe`. The
//! module and the host tests of tests/suites/pure compile the same source; its tests run as KUnit tests and on the host.

/// The bus mastering of one function. The caller's lock makes each call one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BusMastering {
    /// Whether bus mastering was enabled before the first attachment.
    was_enabled: bool,
    attachments: u64,
    stale: u64,
    unconfirmed: u64,
    /// Incremented when all stale mappings are forgotten at once.
    epoch: u64,
}

/// A stale or unconfirmed mapping, for [`BusMastering::confirm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stale {
    epoch: u64,
    translated: bool,
}

impl BusMastering {
    /// Creates the state of a function without attachments.
    pub(crate) const fn new() -> Self {
        Self {
            was_enabled: false,
            attachments: 0,
            stale: 0,
            unconfirmed: 0,
            epoch: 0,
        }
    }

    /// Returns whether the function may do DMA, as the module would set it. `None` if the module does not change
    /// the setting.
    pub(crate) const fn wanted(&self) -> Option<bool> {
        if self.stale > 0 {
            Some(false)
        } else if self.attachments > 0 {
            Some(true)
        } else {
            None
        }
    }

    /// Returns whether stale mappings keep the function from DMA.
    pub(crate) const fn is_stopped(&self) -> bool {
        self.stale > 0
    }

    /// Adds an attachment. `enabled` is the present setting. `quiesced` says that the function uses no stale or unconfirmed
    /// mapping any more. Returns false, and changes nothing, if such mappings forbid the attachment.
    #[must_use]
    pub(crate) fn attach(&mut self, enabled: bool, quiesced: bool) -> bool {
        if quiesced {
            self.forget_stale();
        }
        if self.is_stopped() || self.unconfirmed > 0 {
            return false;
        }
        if self.attachments == 0 {
            self.was_enabled = enabled;
        }
        self.attachments = self.attachments.saturating_add(1);
        true
    }

    /// A mapping of an attachment ended, and nobody has said that the function stopped using it. `translated` says that an
    /// IOMMU ended the access.
    pub(crate) fn add_stale(&mut self, translated: bool) -> Stale {
        let count = if translated {
            &mut self.unconfirmed
        } else {
            &mut self.stale
        };
        *count = count.saturating_add(1);
        Stale {
            epoch: self.epoch,
            translated,
        }
    }

    /// The function does not use a stale or unconfirmed mapping any more. Returns the setting to apply, or `None` to keep
    /// the setting. No effect if all such mappings were forgotten meanwhile.
    #[must_use]
    pub(crate) fn confirm(&mut self, stale: Stale) -> Option<bool> {
        if stale.epoch != self.epoch {
            return None;
        }
        if stale.translated {
            self.unconfirmed = self.unconfirmed.saturating_sub(1);
            return None;
        }
        if self.stale == 0 {
            return None;
        }
        self.stale = self.stale.saturating_sub(1);
        self.rest()
    }

    /// The function uses none of the stale and unconfirmed mappings: it was reset, or its user says so.
    pub(crate) fn forget_stale(&mut self) {
        self.stale = 0;
        self.unconfirmed = 0;
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// The function, which has no attachments, is unbound, and its bus mastering disabled. Returns whether there are stale or unconfirmed
    /// mappings.
    pub(crate) fn unbound(&mut self) -> bool {
        self.was_enabled = false;
        self.stale > 0 || self.unconfirmed > 0
    }

    /// Removes an attachment. Returns the setting to apply. The last attachment restores the setting from before the first
    /// one, unless stale mappings forbid DMA.
    #[must_use]
    pub(crate) fn detach(&mut self) -> Option<bool> {
        self.attachments = self.attachments.saturating_sub(1);
        self.rest()
    }

    /// Returns the setting after the end of an attachment or of a stale mapping.
    const fn rest(&self) -> Option<bool> {
        if self.attachments == 0 && self.stale == 0 {
            return Some(self.was_enabled);
        }
        self.wanted()
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_bus_master))]
mod tests {
    use super::*;

    #[test]
    fn setting_is_restored_by_last_attachment() {
        for before in [false, true] {
            let mut state = BusMastering::new();
            assert_eq!(state.wanted(), None);
            assert!(state.attach(before, false));
            assert!(state.attach(true, false));
            assert_eq!(state.wanted(), Some(true));
            assert_eq!(state.detach(), Some(true));
            assert_eq!(state.detach(), Some(before));
            assert_eq!(state.wanted(), None);
        }
    }

    #[test]
    fn stale_mapping_stops_function_until_confirmed() {
        let mut state = BusMastering::new();
        assert!(state.attach(false, false) && state.attach(true, false));
        let stale = state.add_stale(false);
        assert!(state.is_stopped() && state.wanted() == Some(false));
        assert!(!state.attach(false, false));
        assert_eq!(state.confirm(stale), Some(true));
        assert_eq!(state.detach(), Some(true));
        assert!(state.attach(true, false));
        // Two at once: both have to be confirmed.
        let (first, second) = (state.add_stale(false), state.add_stale(false));
        assert_eq!(state.confirm(first), Some(false));
        assert!(!state.attach(false, false));
        assert_eq!(state.confirm(second), Some(true));
    }

    #[test]
    fn stale_mapping_outlives_its_attachment() {
        let mut state = BusMastering::new();
        assert!(state.attach(true, false));
        let _ = state.add_stale(false);
        assert_eq!(state.detach(), Some(false));
        assert!(!state.attach(false, false));
        // The next user says that the function has stopped.
        assert!(state.attach(false, true));
        assert_eq!(state.wanted(), Some(true));
        assert_eq!(state.detach(), Some(false));
    }

    #[test]
    fn late_confirmation_restores_setting() {
        let mut state = BusMastering::new();
        assert!(state.attach(true, false));
        let stale = state.add_stale(false);
        assert_eq!(state.detach(), Some(false));
        assert_eq!(state.confirm(stale), Some(true));
        // Twice is once.
        assert_eq!(state.confirm(stale), None);
    }

    #[test]
    fn unconfirmed_mapping_forbids_attachments_but_not_dma() {
        let mut state = BusMastering::new();
        assert!(state.attach(false, false));
        let ended = state.add_stale(true);
        assert!(!state.is_stopped() && state.wanted() == Some(true));
        // A new attachment could get the I/O address of the mapping that ended.
        assert!(!state.attach(true, false));
        assert_eq!(state.confirm(ended), None);
        assert!(state.attach(true, false));
        let _ = state.add_stale(true);
        // The user says that the function has stopped.
        assert!(state.attach(true, true));
        assert_eq!(state.wanted(), Some(true));
    }

    #[test]
    fn forgotten_mapping_confirms_no_later_one() {
        let mut state = BusMastering::new();
        assert!(state.attach(false, false));
        let old = state.add_stale(false);
        state.forget_stale();
        let new = state.add_stale(false);
        assert_eq!(state.confirm(old), None);
        assert!(state.is_stopped());
        assert_eq!(state.confirm(new), Some(true));
        assert!(!state.is_stopped());
    }

    #[test]
    fn stale_mapping_outlives_its_binding() {
        let mut state = BusMastering::new();
        assert!(state.attach(true, false));
        let stale = state.add_stale(false);
        assert_eq!(state.detach(), Some(false));
        assert!(state.unbound());
        assert!(!state.attach(false, false));
        // The core has disabled bus mastering: the setting of before is not restored.
        assert_eq!(state.confirm(stale), Some(false));
        assert!(!state.unbound());
        assert!(state.attach(true, false));
        assert_eq!(state.detach(), Some(true));
        let _ = state.add_stale(true);
        assert!(state.unbound());
    }
}
