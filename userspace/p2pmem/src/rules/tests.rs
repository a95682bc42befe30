// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;

fn rules() -> (tempfile::TempDir, Rules) {
    let root = tempfile::tempdir().unwrap();
    let rules = crate::fake::configfs_rules(root.path()).unwrap();
    (root, rules)
}

fn deny(name: &str) -> Rule {
    Rule {
        action: Some(Action::Deny),
        ..Rule::new(name)
    }
}

fn names(rules: &Rules) -> Vec<String> {
    rules.list().unwrap().into_iter().map(|state| state.rule.name).collect()
}

#[test]
fn added_rules_are_listed() {
    let (root, rules) = rules();
    let full = Rule {
        provider: Some("0000:03:00.0".into()),
        client: Some("15b3:101b".into()),
        uid: Some(1000.into()),
        gid: Some(7),
        max_class: Some(PathClass::SameSwitch),
        quota: Some(1 << 30),
        group_quota: Some(0),
        reserve: Some(5),
        reserve_for: Some(Beneficiary::Group),
        ..deny("20-b")
    };
    assert_eq!(rules.add(&full).unwrap().rule, full);
    let off = Rule {
        enabled: false,
        ..Rule::new("10-a")
    };
    rules.add(&off).unwrap();
    let usage = "uid 7 4096\ngroup 8192\nprovider 3 12288\nwhat is this\n";
    fs::write(root.path().join("p2pmem/rules/20-b/usage"), usage).unwrap();
    let all = rules.list().unwrap();
    assert_eq!((&all[0].rule, &all[1].rule), (&off, &full));
    assert_eq!(all[1].usage.len(), 3);
    assert_eq!(all[1].usage[0], Usage::User { uid: 7, bytes: 4096 });
    rules.remove("20-b").unwrap();
    assert!(matches!(rules.remove("20-b"), Err(Error::Missing(_))));
    assert_eq!(names(&rules), ["10-a"]);
}

#[test]
fn users_are_numbers_and_ranges() {
    let users: Users = "1000,100000-165535".parse().unwrap();
    assert_eq!(users.ranges(), [1000..=1000, 100_000..=165_535]);
    assert_eq!(users.to_string(), "1000,100000-165535");
    assert_eq!(serde_json::to_string(&users).unwrap(), "\"1000,100000-165535\"");
    assert_eq!(serde_json::to_string(&Users::from(7)).unwrap(), "7");
    for bad in ["", "root", "-1", "2-1", "1,2,3,4,5", "1-4294967295", "1, 2"] {
        assert!(matches!(bad.parse::<Users>(), Err(Error::Request(_))), "{bad:?}");
    }
    let (_root, rules) = rules();
    let rule = Rule {
        uid: Some(users),
        ..deny("10-alice")
    };
    assert_eq!(rules.add(&rule).unwrap().rule, rule);
}

#[test]
fn refused_rules_are_not_added() {
    let (_root, rules) = rules();
    let error = rules.add(&Rule::new("10-empty")).unwrap_err();
    assert!(error.to_string().contains("the rule says nothing"), "{error}");
    for name in ["", "rule", "10-", "1-a", "10-a b", "10-\u{e9}", &"10-x".repeat(8)] {
        assert!(matches!(rules.add(&deny(name)), Err(Error::Request(_))), "{name:?}");
    }
    assert!(names(&rules).is_empty());
    rules.add(&deny("10-a")).unwrap();
    assert!(matches!(rules.add(&deny("10-a")), Err(Error::Exists(_))));
}

#[test]
fn load_is_all_or_nothing() {
    let (_root, rules) = rules();
    rules.add(&deny("10-a")).unwrap();
    rules.add(&deny("20-b")).unwrap();
    let other = Rule {
        uid: Some(5.into()),
        ..deny("20-b")
    };
    let wanted = [other.clone(), deny("30-c")];
    let loaded = rules.load(&wanted).unwrap();
    assert_eq!(
        (loaded.added, loaded.changed),
        (vec!["30-c".to_owned()], vec!["20-b".to_owned()])
    );
    assert_eq!(names(&rules), ["10-a", "20-b", "30-c"]);
    let loaded = rules.load_only(&wanted).unwrap();
    assert_eq!((loaded.removed, loaded.unchanged.len()), (vec!["10-a".to_owned()], 2));

    // The last rule is refused, and the other rules are restored.
    let bad = [deny("05-new"), deny("20-b"), Rule::new("40-empty")];
    assert!(rules.load_only(&bad).is_err());
    assert_eq!(names(&rules), ["20-b", "30-c"]);
    assert_eq!(rules.get("20-b").unwrap().rule, other);
    assert!(rules.load(&[deny("10-a"), deny("10-a")]).is_err());
}

#[test]
fn quota_changes_in_place() {
    let (_root, rules) = rules();
    let limit = |quota| Rule {
        quota,
        ..Rule::new("10-a")
    };
    rules.add(&limit(Some(4096))).unwrap();
    assert_eq!(rules.set_quota("10-a", Some(0)).unwrap().rule, limit(Some(0)));
    // Without its only setting, the rule in force would be invalid.
    assert!(matches!(rules.set_quota("10-a", None), Err(Error::Admin { .. })));
    assert_eq!(rules.get("10-a").unwrap().rule, limit(Some(0)));
    assert!(matches!(rules.set_quota("20-b", Some(1)), Err(Error::Missing(_))));
}

#[test]
fn rule_with_longest_name_is_replaced() {
    let (_root, rules) = rules();
    let long = format!("10-{}", "x".repeat(28));
    rules.add(&deny(&long)).unwrap();
    let other = Rule {
        uid: Some(1.into()),
        ..deny(&long)
    };
    rules.replace(&other).unwrap();
    assert_eq!(names(&rules), std::slice::from_ref(&long));
    assert!(rules.replace(&Rule::new(&long)).is_err());
    assert_eq!(rules.get(&long).unwrap().rule, other);
}

#[test]
fn missing_module_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let error = Rules::with_root(root.path()).list().unwrap_err();
    assert!(
        error.remedy().unwrap_or_default().contains("modprobe p2pmem"),
        "{error} {:?}",
        error.remedy()
    );
}
