// SPDX-License-Identifier: GPL-2.0

//! The state machine of a buffer: its holders, and when its memory goes back.
//!
//! A buffer is Live until its last holder lets go or it is revoked, whichever comes first. A revoked buffer is Revoking
//! while it is taken from its holders, and then Gone. Holders of a Gone buffer may stay as long as they like. The memory
//! goes back exactly once, at the step to Gone. See "States of a buffer" in Documentation/design/lifecycle.md.
//!
//! The file is pure: it needs nothing but `core`, allocates nothing, cannot panic, takes no lock, and has no `unsafe`. The
//! module and the host tests of tests/suites/pure compile the same source; its tests run as KUnit tests and on the host.

/// The state of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Live,
    Revoking,
    Gone,
}

/// The kind of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// A handle of an open file.
    Handle,
    /// A user mapping (VMA).
    Mapping,
    /// A dma-buf.
    Export,
    /// A registration through the peer-memory interface.
    #[cfg_attr(not(p2pmem_peer), allow(dead_code))]
    Registration,
}

/// State and number of holders of a buffer. The caller's lock makes each call one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    state: State,
    handles: u64,
    mappings: u64,
    exports: u64,
    registrations: u64,
}

impl Life {
    /// Creates a Live buffer with one handle.
    pub(crate) const fn new() -> Self {
        Self {
            state: State::Live,
            handles: 1,
            mappings: 0,
            exports: 0,
            registrations: 0,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Whether the buffer is Live: it may be mapped, exported and registered, and its mappings may be touched.
    pub(crate) fn is_live(&self) -> bool {
        self.state == State::Live
    }

    fn count_mut(&mut self, hold: Hold) -> &mut u64 {
        match hold {
            Hold::Handle => &mut self.handles,
            Hold::Mapping => &mut self.mappings,
            Hold::Export => &mut self.exports,
            Hold::Registration => &mut self.registrations,
        }
    }

    /// Returns the number of holders of that kind.
    pub(crate) fn count(&self, hold: Hold) -> u64 {
        match hold {
            Hold::Handle => self.handles,
            Hold::Mapping => self.mappings,
            Hold::Export => self.exports,
            Hold::Registration => self.registrations,
        }
    }

    /// Adds a holder. Returns false, and changes nothing, if the buffer is not Live.
    #[must_use]
    pub(crate) fn add(&mut self, hold: Hold) -> bool {
        if self.is_live() {
            self.copy(hold);
        }
        self.is_live()
    }

    /// Adds a holder that is a copy of an existing one, such as a mapping in fork(). Allowed in every state, as the
    /// original holder exists in that state too.
    pub(crate) fn copy(&mut self, hold: Hold) {
        let count = self.count_mut(hold);
        *count = count.saturating_add(1);
    }

    /// Removes a holder. Returns true if that made a Live buffer Gone: the caller gives the memory back.
    #[must_use]
    pub(crate) fn remove(&mut self, hold: Hold) -> bool {
        let count = self.count_mut(hold);
        *count = count.saturating_sub(1);
        let held = self.handles | self.mappings | self.exports | self.registrations;
        let last = self.is_live() && held == 0;
        if last {
            self.state = State::Gone;
        }
        last
    }

    /// First part of a revocation: Live becomes Revoking. Returns false if the buffer was not Live.
    #[must_use]
    pub(crate) fn revoke(&mut self) -> bool {
        let live = self.is_live();
        if live {
            self.state = State::Revoking;
        }
        live
    }

    /// Last part of a revocation, when nobody can reach the memory any more. Returns true if the buffer became Gone: the
    /// caller gives the memory back.
    #[must_use]
    pub(crate) fn finish(&mut self) -> bool {
        let first = self.state != State::Gone;
        self.state = State::Gone;
        first
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_life))]
mod tests {
    use super::*;

    #[test]
    fn last_holder_ends_buffer() {
        let mut life = Life::new();
        assert_eq!(life.state(), State::Live);
        assert!(life.add(Hold::Mapping));
        assert!(life.add(Hold::Export));
        life.copy(Hold::Mapping);
        assert_eq!(life.count(Hold::Mapping), 2);
        assert!(!life.remove(Hold::Handle));
        assert!(!life.remove(Hold::Mapping));
        assert!(!life.remove(Hold::Export));
        assert!(life.is_live());
        assert!(life.remove(Hold::Mapping));
        assert_eq!(life.state(), State::Gone);
        assert!(!life.add(Hold::Handle));
        assert!(!life.revoke());
        assert!(!life.finish());
    }

    #[test]
    fn revoked_buffer_ends_with_last_holder_or_revocation() {
        let mut life = Life::new();
        assert!(life.add(Hold::Mapping));
        assert!(life.revoke());
        assert!(!life.revoke());
        assert!(!life.add(Hold::Export));
        assert_eq!(life.count(Hold::Export), 0);
        // All holders let go during the revocation: the revocation gives the memory back.
        let mut early = life;
        assert!(!early.remove(Hold::Mapping));
        assert!(!early.remove(Hold::Handle));
        assert_eq!(early.state(), State::Revoking);
        assert!(early.finish());
        // The holders outlive the revocation.
        assert!(life.finish());
        assert!(!life.finish());
        life.copy(Hold::Mapping);
        assert_eq!(life.count(Hold::Mapping), 2);
        assert!(!life.remove(Hold::Mapping));
        assert!(!life.remove(Hold::Mapping));
        assert!(!life.remove(Hold::Handle));
        assert_eq!(life.state(), State::Gone);
    }

    /// A step of a thread. If a step is refused, the steps that undo it are skipped.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Step {
        Add(Hold),
        Copy(Hold),
        Touch,
        Remove(Hold),
        Revoke,
        Finish,
    }

    /// A program that maps, forks, touches and lets go.
    const PROGRAM: [Step; 7] = [
        Step::Add(Hold::Mapping),
        Step::Touch,
        Step::Copy(Hold::Mapping),
        Step::Remove(Hold::Mapping),
        Step::Touch,
        Step::Remove(Hold::Mapping),
        Step::Remove(Hold::Handle),
    ];
    /// A second holder that exports the buffer, and a device that touches it.
    const EXPORTER: [Step; 3] = [Step::Add(Hold::Export), Step::Touch, Step::Remove(Hold::Export)];
    /// The RDMA core, for a program that registers a mapping and unmaps first.
    const REGISTRAR: [Step; 6] = [
        Step::Add(Hold::Mapping),
        Step::Add(Hold::Registration),
        Step::Remove(Hold::Mapping),
        Step::Touch,
        Step::Remove(Hold::Registration),
        Step::Remove(Hold::Handle),
    ];
    const PROVIDER: [Step; 2] = [Step::Revoke, Step::Finish];
    const NOBODY: [Step; 0] = [];

    /// The model: who joined and left, and where the memory is, without the state machine.
    #[derive(Clone, Copy)]
    struct World {
        life: Life,
        /// The index of each thread's next step.
        at: [usize; 3],
        /// Number of holders of each thread, except its handle.
        held: [u64; 3],
        handles: u64,
        /// How often the memory went back.
        back: u64,
        revoked: bool,
    }

    impl World {
        /// Runs a step of a thread. Returns false if state machine and model disagree.
        fn step(&mut self, thread: usize, step: Step) -> bool {
            self.at[thread] += 1;
            let usable = !self.revoked && self.back == 0;
            match step {
                Step::Add(hold) => {
                    let joined = self.life.add(hold);
                    self.held[thread] += u64::from(joined);
                    joined == usable
                }
                Step::Copy(hold) => {
                    if self.held[thread] > 0 {
                        self.life.copy(hold);
                        self.held[thread] += 1;
                    }
                    true
                }
                Step::Touch => self.held[thread] == 0 || self.life.is_live() == usable,
                Step::Remove(hold) => {
                    if hold == Hold::Handle {
                        self.handles -= 1;
                    } else if self.held[thread] > 0 {
                        self.held[thread] -= 1;
                    } else {
                        return true;
                    }
                    let goes = self.life.remove(hold);
                    self.back += u64::from(goes);
                    let nobody = self.handles == 0 && self.held == [0; 3];
                    goes == (usable && nobody)
                }
                Step::Revoke => {
                    self.revoked = self.life.revoke();
                    self.revoked == usable
                }
                Step::Finish => {
                    // Only the thread that began a revocation ends it.
                    let goes = self.revoked && self.life.finish();
                    self.back += u64::from(goes);
                    goes == self.revoked
                }
            }
        }

        /// Whether all holders are gone and the memory went back once, after all threads ended.
        fn ended(&self) -> bool {
            let none = [Hold::Handle, Hold::Mapping, Hold::Export, Hold::Registration]
                .into_iter()
                .all(|hold| self.life.count(hold) == 0);
            self.back == 1 && none && self.life.state() == State::Gone
        }
    }

    /// Explores all interleavings of the remaining steps. Returns their number, and the number of those that failed.
    fn explore(world: &World, threads: &[&[Step]; 3]) -> (u64, u64) {
        let (mut orders, mut broken) = (0, 0);
        for (thread, steps) in threads.iter().enumerate() {
            if let Some(&step) = steps.get(world.at[thread]) {
                let mut next = *world;
                if !next.step(thread, step) {
                    return (1, 1);
                }
                let (more, wrong) = explore(&next, threads);
                orders += more;
                broken += wrong;
            }
        }
        if orders == 0 {
            return (1, u64::from(!world.ended()));
        }
        (orders, broken)
    }

    fn begin(handles: u64) -> World {
        let mut life = Life::new();
        for _ in 1..handles {
            life.copy(Hold::Handle);
        }
        World {
            life,
            at: [0; 3],
            held: [0; 3],
            handles,
            back: 0,
            revoked: false,
        }
    }

    #[test]
    fn all_orders_of_a_program_and_an_exporter() {
        // 10! / (7! 3!)
        assert_eq!(explore(&begin(1), &[&PROGRAM, &EXPORTER, &NOBODY]), (120, 0));
    }

    #[test]
    fn all_orders_of_a_program_an_exporter_and_a_revocation() {
        // 12! / (7! 3! 2!)
        assert_eq!(explore(&begin(1), &[&PROGRAM, &EXPORTER, &PROVIDER]), (7_920, 0));
    }

    #[test]
    fn all_orders_of_two_programs_and_a_revocation() {
        // 16! / (7! 7! 2!)
        assert_eq!(explore(&begin(2), &[&PROGRAM, &PROGRAM, &PROVIDER]), (411_840, 0));
    }

    #[test]
    fn all_orders_of_a_program_a_registration_and_a_revocation() {
        // 15! / (7! 6! 2!)
        assert_eq!(explore(&begin(2), &[&PROGRAM, &REGISTRAR, &PROVIDER]), (180_180, 0));
    }

    #[test]
    fn second_revocation_does_nothing() {
        // 9! / (7! 2!). The second revocation finds nothing to do.
        assert_eq!(explore(&begin(1), &[&PROGRAM, &PROVIDER, &NOBODY]), (36, 0));
        let mut life = Life::new();
        assert!(life.revoke() && !life.revoke());
        assert!(life.finish() && !life.finish());
    }

    #[test]
    fn violated_invariants_are_detected() {
        // A holder that the model does not know: the memory does not go back with the last known one.
        let mut world = begin(1);
        world.life.copy(Hold::Export);
        let (orders, broken) = explore(&world, &[&PROGRAM, &NOBODY, &NOBODY]);
        assert_eq!((orders, broken), (1, 1));
        // A handle that is removed twice: the memory goes back while the program has it mapped.
        let mut world = begin(2);
        assert!(!world.life.remove(Hold::Handle));
        assert!(explore(&world, &[&PROGRAM, &EXPORTER, &NOBODY]).1 > 0);
    }
}
